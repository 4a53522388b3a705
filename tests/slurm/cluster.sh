#!/bin/bash
# A Slurm cluster on one machine, for tests: each node is a set of namespaces with a network, processes, mounts, a name
# and a clock of its own. The nodes share the kernel and the file system, except /run, /tmp, /dev/shm, /var/log and
# /var/spool. Needs root, and Debian's slurm-wlm, munge, iproute2 and util-linux.
#
#   cluster.sh BASE up NODES PATH...   starts it; BASE is an empty folder outside of those above, PATH what users need
#   cluster.sh BASE in NODE CMD...     runs a command as root on a node: head, n1, n2, ...
#   cluster.sh BASE as NODE CMD...     runs it as the user `trainer`
#   cluster.sh BASE plug NODE up|down  connects a node to the switch, or cuts it off
#   cluster.sh BASE down               ends every process of it
set -euo pipefail
base=$1 what=$2
shift 2
net=10.91.0
closed=/root # a folder that only root may enter, and in which Python may be

of() { cat "$base/$1/pid"; }

child() { # the only child of a process, as soon as it is there
  local found=
  until [ -n "$found" ]; do read -r found _ <"/proc/$1/task/$1/children" || true; done
  echo "$found"
}

enter() {
  local node=$1
  shift
  nsenter -t "$(of "$node")" -n -p -m -u -i -T -- env SLURM_CONF="$base/slurm.conf" "$@"
}

furnish() { # inside the namespaces of a new node, as their first process
  local name=$1 folder file
  shift
  hostname "$name"
  mount --make-rprivate /
  mount -t proc proc /proc
  mount --bind "$base/$name/machine-id" /etc/machine-id
  mount --bind "$base/$name/boot_id" /proc/sys/kernel/random/boot_id
  for file in hosts nsswitch.conf passwd group; do mount --bind "$base/etc/$file" "/etc/$file"; done
  mount --bind "$base/etc/munge.key" /etc/munge/munge.key
  if ! setpriv --reuid 2000 --clear-groups test -x "$closed"; then
    for folder; do
      [[ $folder == $closed/* ]] || continue
      mkdir -p "$base/$name/keep$folder"
      mount --bind "$folder" "$base/$name/keep$folder"
    done
    mount -t tmpfs -o mode=755 none "$closed"
    for folder; do
      [[ $folder == $closed/* ]] || continue
      mkdir -p "$folder"
      mount --move "$base/$name/keep$folder" "$folder"
    done
  fi
  for folder in /run /tmp /var/spool /var/log /var/lib/munge /dev/shm; do mount -t tmpfs -o mode=1777 none "$folder"; done
  mkdir -p /run/munge /var/log/munge /var/spool/slurmd /var/spool/slurmctld
  chown munge /run/munge /var/log/munge /var/lib/munge
  chmod 755 /run /run/munge /var/log /var/log/munge /var/spool /var/lib/munge
  ip link set lo up
  touch "$base/$name/furnished"
  while :; do sleep 3600 & wait $!; done # as the first process, it takes in orphans
}

start_node() { # NAME NUMBER PATH...
  local name=$1 number=$2 pid
  shift 2
  mkdir -p "$base/$name"
  md5sum <<<"$name" | cut -c1-32 >"$base/$name/machine-id"
  cat /proc/sys/kernel/random/uuid >"$base/$name/boot_id"
  setsid unshare --net --uts --ipc --pid --mount --time --monotonic $((1000000 * number)) --boottime $((1000000 * number)) \
    --fork --kill-child -- "$0" "$base" furnish "$name" "$@" >"$base/$name/log" 2>&1 </dev/null &
  echo $! >"$base/$name/starter"
  pid=$(child $!)
  echo "$pid" >"$base/$name/pid"
  ip link add "v$name" netns "$(of switch)" type veth peer name eth0 netns "$pid"
  nsenter -t "$(of switch)" -n ip link set "v$name" master br0 up
  nsenter -t "$pid" -n sh -c "ip addr add $net.$((10 + number))/24 dev eth0; ip link set eth0 up"
}

up() { # NODES PATH...
  local nodes=$1 number name
  shift
  mkdir -p "$base/etc" "$base/switch" "$base/home" "$base/shared"
  chown 2000:2000 "$base/home" "$base/shared"
  dd if=/dev/urandom of="$base/etc/munge.key" bs=1024 count=1 status=none
  chown munge "$base/etc/munge.key"
  chmod 400 "$base/etc/munge.key"
  printf 'passwd: files\ngroup: files\nhosts: files\n' >"$base/etc/nsswitch.conf"
  { cat /etc/passwd; echo "trainer:x:2000:2000::$base/home:/bin/sh"; } >"$base/etc/passwd"
  { cat /etc/group; echo "trainer:x:2000:"; } >"$base/etc/group"
  echo "127.0.0.1 localhost" >"$base/etc/hosts"
  echo "$net.10 head" >>"$base/etc/hosts"
  for number in $(seq "$nodes"); do echo "$net.$((10 + number)) n$number" >>"$base/etc/hosts"; done
  sed "s/@NODES@/$nodes/" "$(dirname "$0")/slurm.conf.in" >"$base/slurm.conf"
  printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\n' >"$base/cgroup.conf"

  setsid unshare --net --fork --kill-child -- sleep infinity >/dev/null 2>&1 </dev/null &
  echo $! >"$base/switch/starter"
  child $! >"$base/switch/pid"
  until nsenter -t "$(of switch)" -n ip link add br0 type bridge 2>/dev/null; do sleep 0.02; done
  nsenter -t "$(of switch)" -n ip link set br0 up
  for number in $(seq 0 "$nodes"); do
    name=n$number
    [ "$number" = 0 ] && name=head
    start_node "$name" "$number" "$@"
  done
  for number in $(seq 0 "$nodes"); do
    name=n$number
    [ "$number" = 0 ] && name=head
    until [ -e "$base/$name/furnished" ]; do
      kill -0 "$(of "$name")" || { cat "$base/$name/log"; exit 1; }
      sleep 0.02
    done
    enter "$name" setpriv --reuid munge --regid munge --clear-groups munged
  done
  enter head slurmctld -c -L /var/log/slurmctld.log
  for number in $(seq "$nodes"); do enter "n$number" slurmd -L /var/log/slurmd.log; done
}

down() {
  local folder pid
  for folder in "$base"/*/; do
    for pid in "$folder/pid" "$folder/starter"; do
      [ -e "$pid" ] && kill -9 "$(cat "$pid")" 2>/dev/null || true
    done
  done
  for _ in $(seq 50); do # what a killed slurmstepd leaves
    find /sys/fs/cgroup/*/slurm_n[0-9]* -depth -type d -exec rmdir {} + 2>/dev/null || true
    compgen -G '/sys/fs/cgroup/*/slurm_n[0-9]*' >/dev/null || break
    sleep 0.1
  done
}

case $what in
  up | down | furnish) "$what" "$@" ;;
  in) enter "$@" ;;
  as)
    node=$1
    shift
    enter "$node" setpriv --reuid 2000 --regid 2000 --init-groups env HOME="$base/home" USER=trainer "$@"
    ;;
  plug) nsenter -t "$(of switch)" -n ip link set "v$1" "$2" ;;
esac
