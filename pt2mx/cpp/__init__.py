"""pt2mx's operators for programs in C++: a shared library, with which packages of AOTInductor run without Python."""

from pt2mx.cpp.library import build, cmake_lines, library_path

__all__ = ["build", "cmake_lines", "library_path"]
