"""Several devices on paper: what they would share, send and wait for; nothing is run.

engines       which parameters an engine would share, and what each device would hold of them
arrival       in which order gradients come
rates         how fast devices and what connects them are, from data sheets
timing        how long a step takes at these rates, and whether collectives are hidden
"""
