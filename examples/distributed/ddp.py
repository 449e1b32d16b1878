"""Two processes, DistributedDataParallel: torchrun --nproc-per-node 2 examples/distributed/ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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
    streambp_fx.transform(model, chunk=64)
    model = DistributedDataParallel(model)

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
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
