#!/usr/bin/env bash
# Measures the GPU of a bare Linux machine, without a network: one command, one report.
#
#     python3 tools/fill_wheels.py                 # before, on a machine with a network
#     tools/on_gpu.sh --minutes 8                  # there; 4 minutes say what decides most
#     tools/on_gpu.sh --smoke                      # without a GPU: that all of it runs
#
# It needs the sources with tools/wheels, and a Python with torch and Triton (PYTHON=python3.12
# names one that is not `python3`). The wheels are unpacked into a folder of /tmp that is
# deleted at the end, so that neither pip nor venv is needed and nothing is installed. Without
# wheels, that Python's own packages are used. Ranks of one machine talk over 127.0.0.1: where
# the loopback is down, as in a fresh network namespace, it is brought up. Options go to
# benchmarks/cuda.py; the report is on_gpu.md by default.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
report=on_gpu.md
options=("$@")
for ((k = 0; k < $#; k++)); do
    case ${options[k]} in
    --report) report=${options[k + 1]:?--report needs a file} ;;
    --report=*) report=${options[k]#--report=} ;;
    esac
done

rm -f "$report"
stop() { # says in the report, too, why nothing was measured
    printf '# On a CUDA device\n\nNot run: %s\n' "$1" | tee "$report"
    exit 1
}

command -v "$python" >/dev/null || stop "there is no $python here; PYTHON=... names another."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
child=
trap '[ -n "$child" ] && kill "$child" 2>/dev/null; exit 143' TERM INT

"$python" - "$root/tools/wheels" "$place" <<'END' || stop "the wheels do not fit; see above."
import importlib.util, sys, zipfile
from pathlib import Path

folder, place = map(Path, sys.argv[1:])
wheels = sorted(folder.glob("*.whl"))
own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
fill = f"tools/fill_wheels.py --python {sys.version_info[0]}.{sys.version_info[1]}"
lacking = "torch_geometric numba pytest psutil".split()
lacking = [name for name in lacking if importlib.util.find_spec(name) is None]
if not wheels and lacking:
    lacks = f"{folder} is empty, and {sys.executable} has no {', '.join(lacking)}"
    sys.exit(f"{lacks}: run {fill} where there is a network")
for wheel in wheels:
    python, abi, _ = wheel.stem.split("-")[-3:]
    if own not in python.split(".") and "py3" not in python.split(".") and abi != "abi3":
        sys.exit(f"{wheel.name} is not for {own}: run {fill} where there is a network")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
        for entry in packed.infolist():  # ptxas, say, is a program
            if entry.external_attr >> 16 & 0o100:
                (place / entry.filename).chmod(0o755)
print(f"{len(wheels)} wheels unpacked")
END

"$python" - <<'END' || stop "nothing can connect to 127.0.0.1: bring the loopback up by 'ip link set lo up'."
import fcntl, socket, struct, sys

def reached():
    with socket.socket() as here, socket.socket() as there:
        here.bind(("127.0.0.1", 0))
        here.listen()
        return there.connect_ex(here.getsockname()) == 0

if not reached():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        try:
            fcntl.ioctl(any_one, 0x8914, up)  # SIOCSIFFLAGS
        except OSError:
            sys.exit(1)
    sys.exit(not reached())
END
export PYTHONPATH=$place:$root
export PYTHONUNBUFFERED=1
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    stop "$python has no torch: install it."

# in the background, so that a signal is passed on at once
"$python" "$root/benchmarks/cuda.py" --report "$report" "$@" &
child=$!
status=0
wait "$child" || status=$?
child=
[ -s "$report" ] || stop "no CUDA device, or see above; --smoke runs on the CPU."
echo "the report: $report"
exit "$status"
