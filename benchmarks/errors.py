"""What can go wrong before anything is measured."""


class BenchmarkError(ValueError):
    """An argument names nothing that there is, or asks for what cannot be done; exit status 2."""
