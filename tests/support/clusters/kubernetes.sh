#!/bin/bash
# A Kubernetes cluster on one machine, for tests: each node is a set of namespaces with a network, processes, mounts and a
# name of its own, and has a kubelet and a containerd. The nodes share the kernel and the file system, except /run and
# /var/log. Needs root, control groups of version 1, and the programs that lab/kubernetes/build makes.
#
#   kubernetes.sh BASE up PROGRAMS NODES  starts it; BASE is an empty folder, PROGRAMS the folder of the programs
#   kubernetes.sh BASE in NODE CMD...     runs a command as root on a node: cp (the control plane), w1, w2, ...
#   kubernetes.sh BASE plug NODE up|down  connects a node to the switch, or cuts it off
#   kubernetes.sh BASE down               ends every process of it
. "$(dirname "$0")/nodes.sh"
net=10.92.0 head=cp letter=w pods=10.93
groups='/sys/fs/cgroup/*/k8s.io'
# Kernel settings of the whole machine that kubelet writes, with the values that it wants.
settings="vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000
  kernel/keys/root_maxbytes=25000000"

enter() {
  local node=$1
  shift
  inside "$node" env PATH="$base/programs/bin:$PATH" KUBECONFIG="$base/etc/admin" "$@"
}

daemon() { # NODE CMD...: its output is in a file of its name
  local node=$1
  shift
  setsid "$0" "$base" in "$node" "$@" >>"$base/$node/$1.log" 2>&1 </dev/null &
}

await() { # SECONDS CMD...
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { echo "not in time: $*" >&2; return 1; }
    sleep 0.1
  done
}

furnish() { # NAME
  local own=$base/$1 setting
  mount --bind "$base/etc/resolv.conf" /etc/resolv.conf
  for setting in $settings; do
    echo "${setting#*=}" >"$own/${setting//[\/=]/-}"
    mount --bind "$own/${setting//[\/=]/-}" "/proc/sys/${setting%=*}"
  done
  mount -t tmpfs -o mode=755 none /run
  mount -t tmpfs -o mode=755 none /var/log
  mkdir -p /var/log/pods /var/log/containers /var/lib/kubelet "$own/kubelet" "$own/containerd"
  mount --bind "$own/kubelet" /var/lib/kubelet
  mount --make-shared /var/lib/kubelet
  mount --make-shared /run
  echo 1 >/proc/sys/net/ipv4/ip_forward
}

configure() {
  local user
  mkdir -p "$base/shared"
  : >"$base/etc/resolv.conf"
  openssl genrsa -out "$base/etc/sa.key" 2048 2>/dev/null
  openssl rsa -in "$base/etc/sa.key" -pubout -out "$base/etc/sa.pub" 2>/dev/null
  printf 'admin,admin,admin,"system:masters"\nchaos,chaos,chaos\n' >"$base/etc/tokens"
  for user in admin chaos; do
    cat >"$base/etc/$user" <<END
{"apiVersion": "v1", "kind": "Config", "current-context": "c",
 "clusters": [{"name": "c", "cluster": {"server": "https://$net.10:6443", "insecure-skip-tls-verify": true}}],
 "users": [{"name": "u", "user": {"token": "$user"}}],
 "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}
END
  done
}

start_control_plane() {
  local etcd=http://127.0.0.1
  daemon cp etcd --data-dir "$base/cp/etcd" --unsafe-no-fsync --listen-client-urls $etcd:2379 --advertise-client-urls $etcd:2379 \
    --listen-peer-urls $etcd:2380
  daemon cp kube-apiserver --etcd-servers $etcd:2379 --cert-dir "$base/cp/certs" --token-auth-file "$base/etc/tokens" \
    --authorization-mode RBAC --service-cluster-ip-range 10.94.0.0/24 --service-account-issuer https://kubernetes \
    --service-account-signing-key-file "$base/etc/sa.key" --service-account-key-file "$base/etc/sa.pub" \
    --advertise-address $net.10 --allow-privileged=true --kubelet-preferred-address-types=InternalIP \
    --disable-admission-plugins=ServiceAccount
  await 60 enter cp kubectl get --raw=/readyz
  daemon cp kube-controller-manager --kubeconfig "$base/etc/admin" --service-account-private-key-file "$base/etc/sa.key" \
    --leader-elect=false --node-monitor-grace-period=20s --pod-eviction-timeout=10s
  daemon cp kube-scheduler --kubeconfig "$base/etc/admin" --leader-elect=false
}

start_worker() { # NUMBER
  local name=w$1 own=$base/w$1 socket=/run/containerd/containerd.sock
  mkdir -p "$own/cni"
  cat >"$own/cni/10.conflist" <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "ipam": {"type": "host-local",
    "ranges": [[{"subnet": "$pods.$1.0/24"}]], "dataDir": "$own/ipam", "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "loopback"}]}
END
  cat >"$own/containerd.toml" <<END
version = 2
root = "$own/containerd"
state = "/run/containerd"
[grpc]
  address = "$socket"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "local/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$base/programs/cni"
    conf_dir = "$own/cni"
END
  daemon "$name" containerd -c "$own/containerd.toml"
  await 60 enter "$name" ctr version
  enter "$name" ctr -n k8s.io images import "$base/images.tar" >/dev/null
  daemon "$name" kubelet --kubeconfig "$base/etc/admin" --container-runtime remote --hostname-override "$name" \
    --container-runtime-endpoint "unix://$socket" --node-ip "$net.$((10 + $1))" --root-dir /var/lib/kubelet \
    --cert-dir "$own/certs" --cgroup-driver cgroupfs --cgroups-per-qos=false --enforce-node-allocatable= \
    --fail-swap-on=false --anonymous-auth=true --authorization-mode=AlwaysAllow --node-status-update-frequency=4s \
    --resolv-conf= --eviction-hard= --image-gc-high-threshold=100 --image-gc-low-threshold=99
}

up() { # PROGRAMS NODES
  local number other name
  ln -s "$1" "$base/programs"
  start_switch "$2"
  configure
  python3 "$(dirname "$0")/images.py" "$base/programs/bin/busybox" "$base/images.tar"
  for number in $(seq 0 "$2"); do
    start_node "$number" 0
    await_node "$number"
    name=$(name_of "$number")
    for other in $(seq "$2"); do
      [ "$other" = "$number" ] || inside "$name" ip route add "$pods.$other.0/24" via "$net.$((10 + other))"
    done
  done
  start_control_plane
  for number in $(seq "$2"); do start_worker "$number"; done
}

case $what in
  up | down | new | plug) "$what" "$@" ;;
  in) enter "$@" ;;
esac
