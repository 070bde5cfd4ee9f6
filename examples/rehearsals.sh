#!/usr/bin/env bash
# One workload of each problem, planned and rehearsed on virtual devices.
set -euo pipefail
hetplan plan --model gpt2 --cluster poplar-b --global-batch 16 --strategies amp -o amp.json && hetplan run amp.json --virtual --steps 20
hetplan plan --model gpt2-medium --cluster ditto-ex1 --global-batch 32 --strategies astra -o astra.json && hetplan run astra.json --virtual --steps 20
hetplan plan --model gpt2 --cluster ditto-ex1 --global-batch 32 --strategies ditto -o ditto.json && hetplan run ditto.json --virtual --steps 20
hetplan plan --model gpt2 --cluster home --global-batch 32 --strategies hap -o hap.json && hetplan run hap.json --virtual --steps 20
hetplan plan --model gpt2 --cluster poplar-b --global-batch 16 --strategies joint -o joint.json && hetplan run joint.json --virtual --steps 20
hetplan plan --model gpt2-medium --cluster poplar-b --global-batch 64 --strategies poplar -o poplar.json && hetplan run poplar.json --virtual --steps 20
