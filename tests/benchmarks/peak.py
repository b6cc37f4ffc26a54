"""The peak memory of a process, as the kernel measures it."""

from pathlib import Path


def forget_peak() -> None:
    """Reset the kernel's measure of the process's peak memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the peak memory of the process since the reset, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024
