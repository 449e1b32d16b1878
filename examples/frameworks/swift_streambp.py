"""A plugin for ms-swift: swift sft --external_plugins swift_streambp.py --callbacks streambp ..."""

from swift.callbacks import callbacks_map

from streambp_fx.integrations import StreamBPCallback

callbacks_map["streambp"] = lambda arguments, trainer: StreamBPCallback(chunk=2000)
