"""What the tests of the pipelines start from."""

import socket

import pytest


@pytest.fixture
def no_network(monkeypatch):
    """Fails a test that opens a connection."""

    def refuse(*arguments):
        pytest.fail(f"the example opened a connection: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
