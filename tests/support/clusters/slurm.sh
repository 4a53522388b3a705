#!/bin/bash
# A Slurm cluster on one machine, for tests: each node is a set of namespaces with a network, processes, mounts, a name
# and a clock of its own. The nodes share the kernel and the file system, except /run, /tmp, /dev/shm, /var/log and
# /var/spool. Needs root, and Debian's slurm-wlm, munge, iproute2 and util-linux.
#
#   slurm.sh BASE up NODES PATH...   starts it; BASE is an empty folder outside of those above, PATH what users need
#   slurm.sh BASE in NODE CMD...     runs a command as root on a node: head, n1, n2, ...
#   slurm.sh BASE as NODE CMD...     runs it as the user `trainer`
#   slurm.sh BASE plug NODE up|down  connects a node to the switch, or cuts it off
#   slurm.sh BASE crash NODE         ends everything on a node at once, as a loss of power does
#   slurm.sh BASE boot NODE          starts a node again after that; what was below /tmp is gone
#   slurm.sh BASE down               ends every process of it
#
# Environment: TORCHAOS_SLURM_USR is the folder /usr of the nodes, for the Slurm of another version of Debian (made by
# debootstrap with the packages above; programs in /usr must be enough).
. "$(dirname "$0")/nodes.sh"
net=10.91.0 head=head letter=n
groups="/sys/fs/cgroup/*/$(basename "$base")" # of this cluster alone; a killed slurmstepd leaves some
closed=/root # a folder that only root may enter, and in which Python may be

enter() {
  local node=$1
  shift
  inside "$node" env SLURM_CONF="$base/slurm.conf" "$@"
}

furnish() { # NAME PATH...
  local name=$1 folder file
  shift
  [ -z "${TORCHAOS_SLURM_USR:-}" ] || mount --bind "$TORCHAOS_SLURM_USR" /usr
  for file in nsswitch.conf passwd group; do mount --bind "$base/etc/$file" "/etc/$file"; done
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
  for folder in /sys/fs/cgroup/*/; do # other clusters of this machine have nodes of the same names
    mkdir -p "$folder$(basename "$base")" 2>/dev/null && mount --bind "$folder$(basename "$base")" "$folder" || true
  done
  for folder in /run /tmp /var/spool /var/log /var/lib/munge /dev/shm; do mount -t tmpfs -o mode=1777 none "$folder"; done
  mkdir -p /run/munge /var/log/munge /var/spool/slurmd /var/spool/slurmctld
  chown munge /run/munge /var/log/munge /var/lib/munge
  chmod 755 /run /run/munge /var/log /var/log/munge /var/spool /var/lib/munge
}

up() { # NODES PATH...
  local nodes=$1 number
  shift
  start_switch "$nodes"
  mkdir -p "$base/home" "$base/shared/runs" "$base/admin" # `runs` also if root has the first run
  chown -R 2000:2000 "$base/home" "$base/shared"
  dd if=/dev/urandom of="$base/etc/munge.key" bs=1024 count=1 status=none
  chown munge "$base/etc/munge.key"
  chmod 400 "$base/etc/munge.key"
  printf 'passwd: files\ngroup: files\nhosts: files\n' >"$base/etc/nsswitch.conf"
  { cat /etc/passwd; echo "trainer:x:2000:2000::$base/home:/bin/sh"; } >"$base/etc/passwd"
  { cat /etc/group; echo "trainer:x:2000:"; } >"$base/etc/group"
  sed "s/@NODES@/$nodes/; s/@LAST@/n[$((nodes - 1))-$nodes]/; s#@BASE@#$base#" "$(dirname "$0")/slurm.conf.in" >"$base/slurm.conf"
  [ -z "${TORCHAOS_SLURM_USR:-}" ] || sed -i 's/^CryptoType=crypto/CredType=cred/' "$base/slurm.conf" # its name from 23.11 on
  printf '#!/bin/sh\n[ ! -x %s/site-epilog ] || %s/site-epilog >>%s/epilog.log 2>&1\n' "$base" "$base" "$base" >"$base/epilog"
  chmod 755 "$base/epilog"
  echo 'Name=gpu File=/dev/zero,/dev/full' >"$base/gres.conf" # any two devices
  printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\n' >"$base/cgroup.conf"
  printf '%s\n' "$@" >"$base/paths"
  for number in $(seq 0 "$nodes"); do begin "$number"; done
  for number in $(seq 0 "$nodes"); do introduce "$number"; done
  enter head slurmctld -c -L /var/log/slurmctld.log
  for number in $(seq "$nodes"); do enter "n$number" slurmd -L /var/log/slurmd.log; done
}

begin() { # NUMBER
  local paths
  mapfile -t paths <"$base/paths"
  start_node "$1" $((1000000 * $1)) "${paths[@]}"
}

introduce() { # NUMBER: from then on, the node can say who it is
  await_node "$1"
  enter "$(name_of "$1")" setpriv --reuid munge --regid munge --clear-groups munged
}

boot() { # NODE
  local number=${1#"$letter"}
  begin "$number"
  introduce "$number"
  enter "$1" slurmd -L /var/log/slurmd.log
}

case $what in
  up | down | new | plug | crash | boot) "$what" "$@" ;;
  in) enter "$@" ;;
  as)
    node=$1
    shift
    enter "$node" setpriv --reuid 2000 --regid 2000 --init-groups env HOME="$base/home" USER=trainer "$@"
    ;;
esac
