"""The primitives of the kernels, as Inductor generates them for each device."""
