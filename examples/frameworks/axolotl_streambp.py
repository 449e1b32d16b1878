"""A plugin for Axolotl, which the config names: plugins: [axolotl_streambp.StreamBPPlugin]"""

from axolotl.integrations.base import BasePlugin

from streambp_fx.integrations import StreamBPCallback


class StreamBPPlugin(BasePlugin):
    """Gives Axolotl's trainer the callback that streams its model."""

    def add_callbacks_pre_trainer(self, cfg, model):
        """The callbacks, which the trainer is made with."""
        return [StreamBPCallback(chunk=2000)]
