"""Steps on paper: how long they would take, and what several devices would share, send and wait for.

amounts       is there a length, or an amount of memory, to plan for
engines       which parameters an engine would share, and what each device would hold of them
arrival       in which order gradients come
compute_rates, measured_rates, place_rates, rates
              how fast devices, what connects them, and places for what is offloaded are: from data sheets,
              or measured on this machine
timing        how long a step takes at these rates, and whether collectives are hidden
several       the plan of a step on several devices
memory_and_work
              what memory buys: ways to run a step, from the least memory to no recompute
step_plan     a plan: what a step needs, and what fits
"""
