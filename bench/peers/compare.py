"""Takes turns between bench/step.lua and a peer that speaks the same --stdin protocol; prints medians, bests and the ratio.

    python bench/peers/compare.py --what train --shape tiny --batch 256 --seq 10 --impl compile
    python bench/peers/compare.py --what sample --shape tiny --batch 32 --prompt 6 --seq 70 --impl compile

A turn waits until the other side's threads sleep, since OpenMP threads spin for a while after their work, and its first
repeats do not count: after a pause a processor is slow for some tens of milliseconds.
"""
import argparse, json, os, statistics, subprocess, sys, time

here = os.path.dirname(os.path.abspath(__file__))
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument('--shape', default='tiny')
p.add_argument('--what', default='train')
p.add_argument('--impl', default='compile')
p.add_argument('--dtype', default='float32')
p.add_argument('--batch', type=int, default=256)
p.add_argument('--seq', type=int, default=10)
p.add_argument('--prompt', type=int, default=6)
p.add_argument('--threads', type=int, default=2)
p.add_argument('--turns', type=int, default=8)
p.add_argument('--repeats', type=int, default=8, help='of a turn; the first three do not count')
p.add_argument('--liger', default=os.path.join(here, '..', '..', 'build', 'liger'))
a = p.parse_args()

sizes = ['--what', a.what, '--batch', str(a.batch), '--seq', str(a.seq), '--prompt', str(a.prompt), '--threads', str(a.threads), '--stdin']
ours = [a.liger, 'run', os.path.join(here, '..', 'step.lua'), '--shape', a.shape] + sizes
peer = [sys.executable, os.path.join(here, 'step_cpu.py'), '--config', a.shape, '--impl', a.impl, '--dtype', a.dtype] + sizes


def start(command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def turn(process):
    rates = []
    for _ in range(a.repeats):
        process.stdin.write('\n')
        process.stdin.flush()
        rates.append(json.loads(process.stdout.readline())['tokens_per_s'])
    return rates[3:]


sides = [start(ours), start(peer)]
for side in sides: turn(side)                         # both are warm before the first turn that counts
rates = [[], []]
for _ in range(a.turns):
    for side, rate in zip(sides, rates):
        time.sleep(0.06)
        rate.append(turn(side))
for side in sides: side.stdin.close()
medians = [[statistics.median(t) for t in rate] for rate in rates]
for name, rate, median in zip(['liger', 'torch ' + a.impl], rates, medians):
    print(f'{name:16s} {statistics.median(median):10.0f} tokens/s (best {max(map(max, rate)):.0f})')
ratio = statistics.median(x / y for x, y in zip(*medians))
print(f'ratio            {ratio:10.2f} (of bests {max(map(max, rates[0])) / max(map(max, rates[1])):.2f})')
