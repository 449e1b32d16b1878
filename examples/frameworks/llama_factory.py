"""LLaMA-Factory: `python llama_factory.py config.yaml` in the place of `llamafactory-cli train`."""

from llamafactory.train.tuner import run_exp

from streambp_fx.integrations import StreamBPCallback

if __name__ == "__main__":
    run_exp(callbacks=[StreamBPCallback(chunk=2000)])  # reads the config that the command line names
