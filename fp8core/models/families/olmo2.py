"""OLMo 2, dense (arXiv 2501.00656): norms follow attention and MLP, and those of Q and K take the mean of all heads.

    x <- x + norm(attention(x)),  x <- x + norm(mlp(x))

The kernels of the other paths norm the residual stream, and heads one by one, so only the exact path computes it."""

from fp8core.models.families.family import Family, LayerParts

FAMILY = Family(
    name="olmo2",
    hf_class="Olmo2ForCausalLM",
    layer=LayerParts(
        norms="after",
        attention_norm="post_attention_layernorm",
        mlp_norm="post_feedforward_layernorm",
        qk_norm="projection",
    ),
    paths=frozenset(),
)
