"""Which attention kernels run while numbers are compared, and which are traced for."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from streambp_fx.passes.graph.kernel_settings import kernels_of_the_user, plain_attention
from streambp_fx.passes.graph.tracing import trace

enabled = torch.backends.cuda


def inputs() -> list:
    with FakeTensorMode():
        return [torch.empty(2, 3), 5, torch.empty(2, 3, device="cuda")]


def test_products_on_a_gpu() -> None:
    """Kernels of GPUs differ from one another in more than rounding."""
    with plain_attention(inputs()):
        assert enabled.math_sdp_enabled()
        assert not (enabled.flash_sdp_enabled() or enabled.mem_efficient_sdp_enabled())
        assert not enabled.cudnn_sdp_enabled()
    assert enabled.flash_sdp_enabled()
    with plain_attention(inputs()[:2]):
        assert enabled.flash_sdp_enabled()


def test_a_trace_is_for_the_kernels_of_the_user() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((enabled.flash_sdp_enabled(), enabled.math_sdp_enabled(), enabled.cudnn_sdp_enabled()))
        return x + 1

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]), plain_attention(inputs()):
        trace(function, torch.ones(2))
        assert not enabled.cudnn_sdp_enabled()
        function(torch.ones(2))
    with kernels_of_the_user():
        function(torch.ones(2))
    assert seen == [(False, True, True), (False, True, False), (True, True, True)]
