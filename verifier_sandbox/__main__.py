"""`python -m verifier_sandbox`."""

from verifier_sandbox.cli import app

app()
