"""Tests over real processes. A package, so that what they share can end with the last of them."""
