"""What programs cost, from their graphs alone: bytes by liveness, operations by op."""
