"""Packages of AOTInductor, with an input signature that each call is checked against."""
