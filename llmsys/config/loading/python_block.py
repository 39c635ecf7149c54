"""Load the attention or feed-forward of a section with `kind: python`: the one place that runs its
code.
"""

from functools import lru_cache

from llmsys.config.block_measurement import MeasuredBlock, PythonFeedForward, PythonMixer
from llmsys.config.loading.python_object import load_python_object
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig


@lru_cache(maxsize=8)
def load_python_block(config: PythonAttentionConfig | PythonFeedForwardConfig) -> MeasuredBlock:
    """Run the user's code and build the object of the section, once in a process. The code imports
    torch.

    Args:
        config: the section.

    Returns:
        The user's object, with its options validated.

    Raises:
        ConfigError: the class is missing or wrong, or an option is.
    """
    if isinstance(config, PythonAttentionConfig):
        return load_python_object(config, PythonMixer, "model.attention")  # type: ignore[type-abstract]
    return load_python_object(config, PythonFeedForward, "model.feed_forward")  # type: ignore[type-abstract]
