"""A step on several devices: parameters that are gathered, rows and gradients that devices share."""
