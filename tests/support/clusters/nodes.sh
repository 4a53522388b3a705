# Nodes of a cluster on one machine, for tests: each is a set of namespaces with a network, processes, mounts and a name of
# its own, behind one switch. A script for a kind of cluster sources this file, and is called as `slurm.sh BASE WHAT ...`.
# It sets `net` (the first three numbers of addresses), `head` and `letter` (names of nodes: head, n1, n2, ...), and
# defines `enter NODE CMD...`, `furnish NAME ...` (makes the inside of a node, as its first process) and `up`.
set -euo pipefail
base=$1 what=$2
shift 2

of() { cat "$base/$1/pid"; }

name_of() { if [ "$1" = 0 ]; then echo "$head"; else echo "$letter$1"; fi; }

child() { # the only child of a process, as soon as it is there
  local found=
  until [ -n "$found" ]; do read -r found _ <"/proc/$1/task/$1/children" || true; done
  echo "$found"
}

inside() { # NODE CMD...
  local node=$1
  shift
  nsenter -t "$(of "$node")" -n -p -m -u -i -T -- "$@"
}

start_switch() { # NODES: and the names of the nodes
  local number
  mkdir -p "$base/etc" "$base/switch"
  echo "127.0.0.1 localhost" >"$base/etc/hosts"
  for number in $(seq 0 "$1"); do echo "$net.$((10 + number)) $(name_of "$number")" >>"$base/etc/hosts"; done
  setsid unshare --net --fork --kill-child -- sleep infinity >/dev/null 2>&1 </dev/null &
  echo $! >"$base/switch/starter"
  child $! >"$base/switch/pid"
  until nsenter -t "$(of switch)" -n ip link add br0 type bridge 2>/dev/null; do sleep 0.02; done
  nsenter -t "$(of switch)" -n ip link set br0 up
}

start_node() { # NUMBER CLOCK WORD...: CLOCK: seconds that its clocks are ahead; the words are for `furnish`
  local number=$1 clock=$2 name pid clocks=()
  name=$(name_of "$number")
  shift 2
  [ "$clock" = 0 ] || clocks=(--time --monotonic "$clock" --boottime "$clock")
  mkdir -p "$base/$name"
  md5sum <<<"$name" | cut -c1-32 >"$base/$name/machine-id"
  cat /proc/sys/kernel/random/uuid >"$base/$name/boot_id"
  setsid unshare --net --uts --ipc --pid --mount "${clocks[@]}" --fork --kill-child -- "$0" "$base" new "$name" "$@" \
    >"$base/$name/log" 2>&1 </dev/null &
  echo $! >"$base/$name/starter"
  pid=$(child $!)
  echo "$pid" >"$base/$name/pid"
  ip link add "v$name" netns "$(of switch)" type veth peer name eth0 netns "$pid"
  nsenter -t "$(of switch)" -n ip link set "v$name" master br0 up
  nsenter -t "$pid" -n sh -c "ip addr add $net.$((10 + number))/24 dev eth0; ip link set eth0 up"
}

new() { # NAME WORD...: the first process of a node
  hostname "$1"
  mount --make-rprivate /
  mount -t proc proc /proc
  mount --bind "$base/$1/machine-id" /etc/machine-id
  mount --bind "$base/$1/boot_id" /proc/sys/kernel/random/boot_id
  mount --bind "$base/etc/hosts" /etc/hosts
  ip link set lo up
  furnish "$@"
  touch "$base/$1/furnished"
  while :; do sleep 3600 & wait $!; done # it takes in orphans
}

await_node() { # NUMBER
  local name
  name=$(name_of "$1")
  until [ -e "$base/$name/furnished" ]; do
    kill -0 "$(of "$name")" || { cat "$base/$name/log"; exit 1; }
    sleep 0.02
  done
}

down() {
  local folder pid
  for folder in "$base"/*/; do
    for pid in "$folder/pid" "$folder/starter"; do
      [ -e "$pid" ] && kill -9 "$(cat "$pid")" 2>/dev/null || true
    done
  done
  for _ in $(seq 50); do # control groups can be removed when they are empty
    find $groups -depth -type d -exec rmdir {} + 2>/dev/null || true
    compgen -G "$groups" >/dev/null || break
    sleep 0.1
  done
}

crash() { # NODE
  local pid
  rm -f "$base/$1/furnished"
  for pid in "$(of "$1")" "$(cat "$base/$1/starter")"; do
    kill -9 "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
  done
  while nsenter -t "$(of switch)" -n ip link show "v$1" >/dev/null 2>&1; do sleep 0.02; done # the kernel takes its time
}

plug() { nsenter -t "$(of switch)" -n ip link set "v$1" "$2"; }
