"""The names of rules_proto, as the rules that are built into Bazel."""

proto_library = native.proto_library
proto_lang_toolchain = native.proto_lang_toolchain
