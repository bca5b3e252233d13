"""Commands around the package: measurements and pictures."""
