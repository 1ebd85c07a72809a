"""What several architectures share: blocks, and pieces of how they are published."""

from archir.layout import Layout, alias, tensor

# config.json: rotary embedding as it is, not scaled for longer contexts, of the whole head.
PLAIN_ROTARY = {
    "partial_rotary_factor": (1.0,),
    "rope_parameters.partial_rotary_factor": (1.0,),
    "rope_parameters.rope_type": ("default",),
    "rope_scaling.rope_type": ("default",),
    "rope_scaling.type": ("default",),
}


def head_names(tied: bool, table: str, published: Layout, head: str) -> dict[str, Layout]:
    """The embedding, and the head: a tensor of its own or, tied, at most a copy of the table."""
    if tied:
        return {table: alias(published, head)}
    return {table: published, "lm_head.weight": tensor(head)}
