"""Packages of AOTInductor: what they take, checked before each call."""
