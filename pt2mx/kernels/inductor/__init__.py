"""The primitives of the reference in the form that Inductor compiles best, for each device."""
