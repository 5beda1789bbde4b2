"""Problems whose submission is a function: the driver that calls it inside the jail.

The driver reads the JSON array of arguments from standard input and prints the result as JSON to
what was standard output; the submission's own printing goes nowhere. It can forge the printed
value, but that gains nothing: the expected result is not in the process. The comparison happens
outside, on parsed JSON, where no `__eq__` of the submission's reaches.

The submission is the module `solution`, as dataclasses and pickle want to find it. The driver stays
`__main__`, and keeps what it uses afterwards in local variables.
"""

from __future__ import annotations

_DRIVER = """
def _run():
    import json, os, sys, types
    arguments = json.loads(sys.stdin.read())
    out = os.dup(1)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    dumps, write, leave = json.dumps, os.write, os._exit
    module = sys.modules["solution"] = types.ModuleType("solution")
    namespace = module.__dict__
    namespace["__file__"] = "solution.py"
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)  # this frame
    exec(compile({source!r}, "solution.py", "exec", dont_inherit=True), namespace)
    function = namespace.get({name!r})
    if function is None:
        function = getattr(namespace["Solution"](), {name!r})
    text = memoryview(dumps(function(*arguments), default=list).encode())
    while text:
        text = text[write(out, text):]
    leave(0)

_run()
"""


def with_driver(source: str, function_name: str) -> str:
    """A program that defines `source` and prints the JSON of one call of the function."""
    return _DRIVER.format(source=source, name=function_name)
