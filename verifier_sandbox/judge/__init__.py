"""From a request to a verdict: drawing tests, compiling, running, comparing."""
