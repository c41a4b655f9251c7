"""A configuration like the demo model's, as small as tests of training need it."""

from demo_model.model import ModelConfig

TINY = ModelConfig(
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
