"""Helpers of the tests of passes are the files beside this one: it puts its folder onto the path."""
