"""How passes are run.

runner     a pass has a name, a purpose and one signature; they are timed, reported, and named in errors
verifier   is what a pass claims so
log        what passes tell the log, and observers
"""
