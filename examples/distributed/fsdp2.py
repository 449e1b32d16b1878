"""Two processes, FSDP2: torchrun --nproc-per-node 2 examples/distributed/fsdp2.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    streambp_fx.transform(model, chunk=64)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        ids = torch.randint(0, 1000, (1, 500 + 100 * dist.get_rank()))  # lengths may differ
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.full_tensor().item():.3f}")
        else:
            norm.full_tensor()  # a collective: all processes call it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
