"""The old place of `streambp_fx.measure`: its documented modules are found here as well."""
