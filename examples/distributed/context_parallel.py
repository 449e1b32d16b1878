"""Two processes, one sequence: torchrun --nproc-per-node 2 examples/distributed/context_parallel.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)  # the same weights in all processes
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    streambp_fx.transform(model, chunk=64, mesh=mesh["cp"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        ids = torch.randint(0, 1000, (1, 1001))  # and the same whole sequence
        loss = model(input_ids=ids, labels=ids).loss  # that of the whole sequence
        loss.backward()  # gradients are those of the whole sequence, in all processes
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
