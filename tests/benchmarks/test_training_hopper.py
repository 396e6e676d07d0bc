"""Every kernel of a step is counted to the part that it belongs to."""

import pytest

from benchmarks.training_hopper import part_of


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_qqsss_128x128_128x6_2x1_v_bz_coopA_algo2_Avec128_Bvec128_TNT", "block-FP8 GEMM"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 24576u", "block-FP8 GEMM"),
        ("void deep_gemm::sm90_bf16_gemm_impl<(cute::UMMA::Major)0", "BF16 GEMM"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "BF16 GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false", "attention"),
        ("decode_attention", "attention"),
        ("_add_norm_row_codes_kernel", "quantise, with the norm or SwiGLU before it"),
        ("_backward_codes_kernel", "quantise, with the norm or SwiGLU before it"),
        ("_backward_kernel", "norm, rotary, SwiGLU"),
        ("_add_norm_kernel", "norm, rotary, SwiGLU"),
        ("_adamw_kernel", "optimiser"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda", "other"),
    ],
)
def test_part(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
