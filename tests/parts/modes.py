"""Base of the dispatch modes of tests."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls):
        """False: nothing is compiled under the mode."""
        return False
