"""The README's Python blocks run as they stand."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"

BLOCK = re.compile(
    r"(?P<mark><!-- not run: [^\n]* -->\n)?```python\n(?P<code>.*?)```",
    re.DOTALL,
)


@pytest.mark.tensorflow_only("the README exports a SavedModel")
def test_readme_blocks_run_in_order(tmp_path, monkeypatch):
    text = README.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    # A fence that the pattern misses would be a block that nobody runs.
    assert len(blocks) == text.count("```python") > 5
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for block in blocks:
        # The line breaks make the README's own line numbers stand in errors.
        line = text.count("\n", 0, block.start("code"))
        code = compile("\n" * line + block["code"], str(README), "exec")
        if not block["mark"]:
            exec(code, namespace)
