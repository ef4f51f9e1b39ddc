"""Tests of every way to have a worker. A package, so that what they share can end with the last of them."""
