"""The measurements behind `magistral bench`: each module has a `main`."""
