"""Programmatic dependent launch (CUDA Programming Guide, section of that name): a kernel starts while the one before it
ends, and lets the next one do so."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def pdl_wait(C: gl.constexpr):
    """From here on a kernel may read all that the kernels before it wrote, and overwrite what they read."""
    if C.use_pdl:
        gdc_wait()


@gluon.jit
def pdl_launch_dependents(C: gl.constexpr):
    """Once every program has come here, the next kernel may start and wait for the end of this one. Earlier, programs
    of the next one would crowd on the few multiprocessors that have places left."""
    if C.use_pdl:
        gdc_launch_dependents()
