"""Which attention kernel the probe runs with."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from streambp_fx.probing.captured_run import rows_apart


def test_products_on_a_gpu() -> None:
    """Kernels of GPUs may round a row in another way when others change."""
    enabled = torch.backends.cuda
    with FakeTensorMode():
        inputs = [torch.empty(2, 3), 5, torch.empty(2, 3, device="cuda")]
    with rows_apart(inputs):
        assert enabled.math_sdp_enabled()
        assert not (enabled.flash_sdp_enabled() or enabled.mem_efficient_sdp_enabled())
        assert not enabled.cudnn_sdp_enabled()
    assert enabled.flash_sdp_enabled()
    with rows_apart(inputs[:2]):
        assert enabled.flash_sdp_enabled()
