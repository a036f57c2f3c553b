"""Measurements that ship with the project. Nothing imports this package."""
