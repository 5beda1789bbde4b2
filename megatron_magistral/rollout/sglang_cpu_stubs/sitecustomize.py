"""Stand-ins for three packages that SGLang imports but, on a CPU, never uses.

Python imports a module of this name at the start of every process. The folder is on the PYTHONPATH
of SGLang servers on machines without CUDA, and of nothing else.

    triton       GPU kernels are declared at import time (`@triton.jit`); 700 MB to declare them
    sgl_kernel   no CPU build is published; a dense model on the torch-native backend calls nothing
    torchvision  the wheel on PyPI is a CUDA build that cannot load next to a CPU-only torch; only
                 image processors use it

Every name below these packages resolves: a capitalised name is a class, any other a placeholder
that is a submodule, a decorator and a decorator factory in one. Launching a kernel is an error.
"""

import functools
import importlib
import sys
import types
from importlib.machinery import ModuleSpec

VERSIONS = {"triton": "3.0.0", "sgl_kernel": "0.0.0", "torchvision": "0.0.0"}


class Kernel:
    """A declared kernel: keeps the Python function, refuses to be launched."""

    def __init__(self, fn):
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __getitem__(self, grid):
        raise NotImplementedError(f"kernel {self.__name__} was launched on a machine without CUDA")

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def decorate(*args, **kwargs):
    """Serve `@jit`, `@jit(...)`, `@autotune(configs=...)` and calls made while a module loads."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0] if isinstance(args[0], Kernel) else Kernel(args[0])
    return decorate


class PlaceholderClass(type):
    """Metaclass of stand-in classes: any attribute (an enum member, say) is its own name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def placeholder_class(name):
    if name.endswith("Error") or name == "OutOfResources":
        return type(name, (Exception,), {})
    return PlaceholderClass(name, (), {"__init__": lambda self, *args, **kwargs: None})


class Placeholder(types.ModuleType):
    __call__ = staticmethod(decorate)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name[0].isupper():
            value = placeholder_class(name)
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class PlaceholderFinder:
    """Imports the packages above, and everything below them, as placeholders."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in VERSIONS:
            return ModuleSpec(fullname, cls, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return Placeholder(spec.name)

    @staticmethod
    def exec_module(module):
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]
        if module.__name__ == "triton":
            module.cdiv = lambda numerator, denominator: -(numerator // -denominator)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


sys.meta_path.insert(0, PlaceholderFinder)
