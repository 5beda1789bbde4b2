"""Verifiers of model output, each in killable sandboxed workers. Importable alone."""
