#!/usr/bin/env bash
# The main job, shown to a person: MyApp, reconciled by a WebAssembly plugin on a real Kubernetes. `make demo` builds what it
# needs.
#
#     make demo                 on a control plane of its own, which is gone afterwards
#     USE_CLUSTER=1 make demo   on the cluster of your kubeconfig, in a namespace of its own; what it makes there it removes
#
# Every step is observed, with a time limit. Exits 0 only if all of them were.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${PILOTHOUSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilothouse}
target=${CARGO_TARGET_DIR:-$cache/target}
use_cluster=${USE_CLUSTER:-}
if [[ -n $use_cluster ]]; then
  namespace=pilothouse-demo-$(date +%s)
  patience=180 # seconds: images have to be pulled
else
  namespace=demo
  patience=60
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/pilothouse-demo.XXXXXX")
host_log=$work/host.log
audit_log=   # of the control plane, if it is ours
control_pid= # of the control plane, if it is ours
registry=    # host and port of a registry of images, where there is one
registry_pid=
servers_pid= # of PostgreSQL and the S3 server
buckets=     # the folder of the latter
host_pid=
watch_pid=
installed=  # set once something of ours may be in the cluster
complained= # set once the reason of a failure was told
titles=()
findings=()
finding= # what the current step has seen
children=deployments,replicasets,pods,configmaps
ours=app.kubernetes.io/instance=web # the label on all of them

# ---- What the person sees

if [[ -t 1 ]]; then
  bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' cyan=$'\e[36m' plain=$'\e[0m'
else
  bold='' dim='' green='' red='' cyan='' plain=''
fi

say() { printf '%s\n' "$@"; }

seen() { printf '  %sseen:%s %s\n' "$green" "$plain" "$1"; }

# Time to read, where somebody does.
pause() { [[ ! -t 1 ]] || sleep 1.5; }

# Shows a command and runs it: what is printed is what is run.
show() {
  printf '  %s$ %s%s\n' "$cyan" "$1" "$plain"
  if ! eval "$1" >out 2>&1; then
    sed 's/^/  /' out
    fail "this command failed: $1"
  fi
  sed 's/^/  /' out
}

# The same, for a command whose output is what matters.
look() {
  show "$1"
  pause
}

fail() {
  complained=yes
  printf '\n%sThe demo failed: %s%s\n' "$red" "$1" "$plain" >&2
  if [[ -s $host_log ]]; then
    printf 'The end of the log of the host:\n' >&2
    tail -n 15 "$host_log" | cut -c 1-400 | sed 's/^/  /' >&2
  fi
  exit 1
}

# ---- Observing

now() { printf '%s' "$((${EPOCHREALTIME/[.,]/} / 1000))"; } # milliseconds

# Milliseconds as a person says them.
duration() {
  if (($1 < 1000)); then printf '%d ms' "$1"; else printf '%d.%d s' $(($1 / 1000)) $(($1 % 1000 / 100)); fi
}

since() { duration $(($(now) - $1)); }

# Waits until a command succeeds: eventually SECONDS "what is waited for" command arguments…
eventually() {
  local limit=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < limit)) || fail "not seen in time: $what"
    host_is_alive || fail "the host has ended"
    sleep 0.1
  done
}

host_is_alive() { [[ -z $host_pid ]] || kill -0 "$host_pid" 2>/dev/null; }

# A field of an object: field deployment/web .spec.replicas
field() { kubectl get "$1" -o "jsonpath={$2}"; }

is() { [[ $(field "$1" "$2") == "$3" ]]; }

has_lines() { (($(wc -l <"$1") >= $2)); }

# The UIDs of our pods that are ready, and stay.
ready_pods() {
  local pod='{.metadata.deletionTimestamp}{" "}{.status.conditions[?(@.type=="Ready")].status}{" "}{.metadata.uid}{"\n"}'
  kubectl get pods -l "$ours" -o "jsonpath={range .items[*]}$pod{end}" | awk '$1 == "True" { print $2 }' | sort
}

# As many pods are ready, and the MyApp says so.
settled_at() {
  [[ $(ready_pods | wc -l) == "$1" ]] && is deployment/web .status.readyReplicas "$1" &&
    is myapp/web .status.availableReplicas "$1" && is myapp/web '.status.conditions[?(@.type=="Ready")].status' True
}

# How often the host has written anything; only a control plane of ours tells. How its parents are it tells on the reconciler, at most
# every ten seconds: that may come later than what it is about.
host_writes() {
  [[ -z $audit_log ]] || grep -E '"verb":"(create|update|patch|delete)"' "$audit_log" | grep -v '"resource":"clusterreconcilers"' |
    grep -c '"userAgent":"pilothouse/' || true
}

# That, and all that somebody could have written to the Deployment.
written() {
  kubectl get deployment web -o 'jsonpath={.metadata.generation}{.metadata.labels}{.metadata.annotations}{.spec}'
  host_writes
}

# Nobody writes for so many seconds.
is_quiet() {
  local before
  before=$(written)
  sleep "$1"
  [[ $(written) == "$before" ]]
}

left_alone() {
  say "  ${dim}(watching for $1 seconds)$plain"
  is_quiet "$1" || fail "somebody has written, and the host should have left everything alone"
  host_is_alive || fail "the host has ended"
}

# ---- Setting up

prepare() {
  [[ -x $target/debug/pilothouse && -f $target/plugins/myapp.wasm ]] ||
    fail "the host or the plugin is not built: run \`make demo\`"
  umask 077 # kubeconfigs
  cd "$work"
  ln -s "$root/host/deploy/host.yaml" "$target/plugins/myapp.wasm" .
  export PATH="$target/debug:$PATH" KUBECACHEDIR="$work/kube-cache"
}

start_control_plane() {
  local line='' limit=$((SECONDS + 120))
  say "Starting a Kubernetes control plane: etcd, API server, controller manager, scheduler, and a node that plays its pods."
  mkfifo control
  control-plane run <control >location 2>control-plane.log 7>&- 8>&- &
  control_pid=$!
  exec 9>control # it ends when this is closed, in whatever way the demo ends
  until [[ -e location ]] && line=$(<location) && [[ $line == *'}' ]]; do
    if ((SECONDS >= limit)) || ! kill -0 "$control_pid" 2>/dev/null; then
      fail "the control plane did not start: $(cat location control-plane.log)"
    fi
    sleep 0.1
  done
  [[ $line != '{"error"'* ]] || fail "the control plane did not start: $line"
  audit_log=$(text_of auditLog <<<"$line")
  KUBECONFIG=$(text_of kubeconfig <<<"$line")
  PATH="$(text_of binDir <<<"$line"):$PATH"
  export KUBECONFIG PATH
}

# A registry of images beside it, as others run one in their network.
start_registry() {
  local program
  program=$("$root/tests/distribution/build.sh" --where)/registry
  [[ -x $program ]] || fail "the registry is not built: run \`make demo\`"
  printf '{version: 0.1, storage: {filesystem: {rootdirectory: %s/artifacts}}, http: {addr: "127.0.0.1:0", secret: none}}' "$work" >registry.yaml
  OTEL_TRACES_EXPORTER=none "$program" serve registry.yaml >registry.log 2>&1 7>&- 8>&- 9>&- &
  registry_pid=$!
  eventually 30 "the registry listens" grep -q 'listening on' registry.log
  registry=$(sed -n 's/.*listening on \([0-9.:]*\).*/\1/p' registry.log | head -n 1)
}

# What is outside of the cluster: a database and an S3 server.
start_servers() {
  local line='' limit=$((SECONDS + 60))
  mkfifo to-servers
  servers <to-servers >servers.json 2>servers.log 7>&- 8>&- 9>&- &
  servers_pid=$!
  exec 6>to-servers # they end when this is closed
  until [[ -s servers.json ]]; do
    if ((SECONDS >= limit)) || ! kill -0 "$servers_pid" 2>/dev/null; then
      fail "PostgreSQL and the S3 server did not start: $(cat servers.log)"
    fi
    sleep 0.1
  done
  line=$(head -n 1 servers.json)
  buckets=$(text_of folder <<<"$line")
  database=$(text_of database <<<"$line")
  export database buckets
  cat >grants.yaml <<END
sql:
  - name: records
    engine: postgres
    access: Write
    secretRef: {namespace: pilothouse-system, name: myapp-database}
http:
  - name: buckets
    url: $(text_of buckets <<<"$line")
    methods: [GET, HEAD, PUT, POST, DELETE]
    timeout: 2s
    allowNetworks: [127.0.0.0/8]
    auth: {awsSigV4: {region: $(text_of region <<<"$line"), service: s3, secretRef: {namespace: pilothouse-system, name: myapp-buckets}}}
END
  kubectl create secret generic myapp-database --namespace pilothouse-system --dry-run=client -o yaml \
    --from-literal "uri=$database" >secrets.yaml
  say --- >>secrets.yaml
  kubectl create secret generic myapp-buckets --namespace pilothouse-system --dry-run=client -o yaml \
    --from-literal "accessKeyId=$(text_of accessKeyId <<<"$line")" --from-literal "secretAccessKey=$(text_of secretAccessKey <<<"$line")" >>secrets.yaml
}

# Tells them to do something, and waits until it is done.
tell_servers() {
  local before
  before=$(wc -l <servers.json)
  say "$1" >&6
  eventually 20 "$1" has_lines servers.json $((before + 1))
}

# A text in a line of JSON.
text_of() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }

use_existing_cluster() {
  local thing answer
  command -v kubectl >/dev/null || PATH="$PATH:$("$root/tests/control-plane/build.sh" --where)"
  command -v kubectl >/dev/null || fail "there is no kubectl in PATH"
  answer=$(kubectl version 2>&1) || fail "the cluster of your kubeconfig does not answer: $(tail -n 1 <<<"$answer")"
  # So that all of it may be removed in the end, and no second host works beside one that is there.
  for thing in namespace/pilothouse-system crd/clusterreconcilers.pilothouse.dev crd/myapps.mygroup.example.com; do
    [[ -z $(kubectl get "$thing" --ignore-not-found -o name) ]] ||
      fail "your cluster has $thing already. The demo brings its own and removes it in the end, so it has not touched your cluster."
  done
  say "Using your cluster: context $(kubectl config current-context), namespace $namespace."
}

# A kubeconfig of our own, so that commands need to name no namespace, and the user's stays as it is.
own_kubeconfig() {
  kubectl config view --minify --flatten --raw >kubeconfig
  export KUBECONFIG=$work/kubeconfig
  kubectl config set-context --current --namespace="$namespace" >/dev/null
}

# The host gets a token of its own account: never the rights of whoever runs the demo.
host_kubeconfig() {
  local cluster token
  cluster=$(kubectl config view --raw -o 'jsonpath={.clusters[0].cluster}')
  token=$(kubectl create token pilothouse --namespace pilothouse-system --duration 1h)
  cat >host.kubeconfig <<END
apiVersion: v1
kind: Config
current-context: host
clusters: [{name: cluster, cluster: $cluster}]
users: [{name: host, user: {token: "$token"}}]
contexts: [{name: host, context: {cluster: cluster, user: host}}]
END
}

start_host() {
  KUBECONFIG=$work/host.kubeconfig pilothouse run --cache-dir "$work/cache" ${registry:+--insecure-registry "$registry"} --health-probe-bind-address 127.0.0.1:0 --metrics-bind-address 127.0.0.1:0 --log-format json 2>"$host_log" 7>&- 8>&- 9>&- &
  host_pid=$!
  eventually 30 "the host is ready (/readyz)" host_is_ready
}

host_is_ready() {
  local health
  health=$(grep -m 1 '"message":"pilothouse runs"' "$host_log" | text_of health)
  [[ -n $health && $(kubectl --kubeconfig /dev/null --server "http://$health" get --raw /readyz) == ok* ]]
}

# ---- Taking away

clean_up() {
  local code=$?
  trap - EXIT
  trap '' INT TERM
  set +e
  exec >&7 2>&8 # a signal may have come while output went elsewhere
  ((code == 0 || code > 128)) || [[ -n $complained ]] || (fail "a command failed in step $((${#titles[@]} + 1))")
  end "$watch_pid"
  [[ -z $use_cluster || -z $installed ]] || uninstall
  end "$host_pid"
  end "$registry_pid"
  exec 6>&-
  [[ -z $servers_pid ]] || wait "$servers_pid" 2>/dev/null
  exec 9>&-
  [[ -z $control_pid ]] || wait "$control_pid" 2>/dev/null
  cd "$root" || exit
  if ((code == 1)) && [[ -s $host_log ]]; then
    rm -f "$work/kubeconfig" "$work/host.kubeconfig"
    say "The whole log: $host_log" >&2
  else
    rm -rf "$work"
  fi
  exit "$code"
}

# Ends a process of ours, by its id, and waits for it.
end() {
  [[ -n $1 ]] || return 0
  kill "$1" 2>/dev/null
  wait "$1" 2>/dev/null
}

# In the user's cluster: all that the demo has made, while the host still runs and takes its finalizers off.
uninstall() {
  local left
  say "" "Removing what the demo has made in your cluster."
  delete_all myapps
  delete_all clusterreconcilers
  kubectl delete namespace "$namespace" --ignore-not-found --timeout 120s
  [[ ! -s manifests.yaml ]] || kubectl delete -f manifests.yaml --ignore-not-found --timeout 120s
  kubectl delete -f host.yaml --ignore-not-found --timeout 120s
  pilothouse crds | kubectl delete -f - --ignore-not-found --timeout 60s
  left=$(kubectl get namespaces,crds,clusterroles,clusterrolebindings -o name | grep -E 'pilothouse|myapps\.mygroup\.example\.com')
  if [[ -z $left ]]; then say "Nothing is left."; else say "Still there, please look at it:" "$left"; fi
}

# Deletes all objects of a kind. Without a host nobody takes our finalizers off them; what MyApps have outside of the cluster goes with
# the servers of the demo, so this may.
delete_all() {
  local object
  kubectl delete "$1" --all --wait=false 2>/dev/null
  host_is_alive && kubectl wait --for delete "$1" --all --timeout 30s >/dev/null 2>&1
  for object in $(kubectl get "$1" -o name 2>/dev/null); do
    kubectl patch "$object" --type merge --patch '{"metadata":{"finalizers":null}}' >/dev/null
  done
}

# ---- The steps. Each leaves in `finding` what it has seen, or fails.

step() {
  say "" "${bold}$((${#titles[@]} + 1)). $1$plain"
  "$2"
  seen "$finding"
  titles+=("$1")
  findings+=("$finding")
  pause
}

install_host() {
  say "The host's own kind, account and role come first. The host runs as that account, which may do next to nothing:"
  installed=yes
  show "pilothouse crds | kubectl apply --server-side -f -"
  show "kubectl wait --for condition=Established crd/clusterreconcilers.pilothouse.dev --timeout 30s"
  show "kubectl apply --server-side -f host.yaml"
  kubectl create namespace "$namespace" >/dev/null
  host_kubeconfig
  show "kubectl --kubeconfig host.kubeconfig auth whoami -o jsonpath='{.status.userInfo.username}'; echo"
  look "kubectl --kubeconfig host.kubeconfig auth can-i create deployments || true"
  [[ $(<out) == no ]] || fail "the host may create Deployments by itself"
  start_host
  finding="the host is ready, and may not even create a Deployment by itself"
}

install_plugin() {
  say "The plugin is one WebAssembly file. From it come the CRD of MyApp, an account for it, and the rights of that account:"
  say "What it may reach outside of the cluster is granted to it, and the credentials are in Secrets that it never sees:"
  look "cat grants.yaml"
  show "kubectl apply --server-side -f secrets.yaml"
  show "pilothouse manifests myapp.wasm --grants grants.yaml >manifests.yaml && kubectl apply --server-side -f manifests.yaml"
  show "kubectl wait --for condition=Ready clusterreconciler/myapp --timeout ${patience}s"
  look "kubectl get clusterreconcilers"
  finding="the plugin is loaded, and its kinds are being watched"
}

create() {
  local start
  cat >web.yaml <<'END'
apiVersion: mygroup.example.com/v1
kind: MyApp
metadata:
  name: web
spec:
  image: nginx:1.27
  replicas: 3
  config:
    color: blue
END
  say "A user asks for a MyApp with three pods:"
  look "cat web.yaml"
  start=$(now)
  show "kubectl apply -f web.yaml"
  eventually "$patience" "3 ready pods, and the MyApp says so" settled_at 3
  finding="3 ready pods, a ConfigMap and the status, after $(since "$start")"
  look "kubectl get $children -l $ours"
  say "And the MyApp says so:"
  show "kubectl get myapp web"
  look "kubectl get myapp web -o jsonpath='{range .status.conditions[*]}{.type}={.status} {.reason} {.message}{\"\\n\"}{end}'"
  is deployment/web '.metadata.ownerReferences[?(@.controller==true)].kind' MyApp || fail "the Deployment has not the MyApp as its owner"
  is configmap/web-config .data.color blue || fail "the ConfigMap is not as it should be"
}

heal() {
  local image='{.spec.template.spec.containers[0].image}' edited healed
  say "Somebody changes the image behind the back of the MyApp, while we watch the Deployment:"
  note_images "$image"
  show "kubectl set image deployment/web myapp=nginx:broken -o jsonpath='$image'; echo"
  [[ $(<out) == nginx:broken ]] || fail "the edit was not accepted"
  eventually 30 "the watch has shown the edit, and that it was taken back" has_lines images 3
  end "$watch_pid" || true
  watch_pid=
  [[ $(cut -d ' ' -f 2 images | paste -sd ' ') == "nginx:1.27 nginx:broken nginx:1.27" ]] ||
    fail "the Deployment went another way: $(cut -d ' ' -f 2 images | paste -sd ' ')"
  edited=$(awk 'NR == 2 { print $1 }' images)
  healed=$(duration $(($(awk 'NR == 3 { print $1 }' images) - edited)))
  say "What the watch has seen:"
  printf '  %10s  %s\n' "before" nginx:1.27 "0 ms" nginx:broken "$healed" nginx:1.27
  eventually "$patience" "3 ready pods again, and the MyApp says so" settled_at 3
  finding="healed $healed after the edit"
}

# Writes the time and the image of the Deployment to the file `images`, each time that it changes.
note_images() {
  : >images
  mkfifo watch
  kubectl get deployment web --watch -o "jsonpath=$1{\"\\n\"}" >watch 2>/dev/null 7>&- 8>&- 9>&- &
  watch_pid=$!
  while read -r image; do
    [[ $image == "${before:-}" ]] || printf '%s %s\n' "$(now)" "$image" >>images
    before=$image
  done <watch 7>&- 8>&- 9>&- &
  eventually 30 "the watch of the Deployment has begun" has_lines images 1
}

foreign_label() {
  local before
  say "Somebody adds a label to the Deployment. It takes nothing from us, so it is none of our business:"
  eventually 30 "nobody writes any more" is_quiet 1
  before=$(host_writes)
  show "kubectl label deployment web team=blue"
  left_alone 3
  look "kubectl get deployment web --label-columns team"
  is deployment/web .metadata.labels.team blue || fail "the label is gone"
  [[ $(host_writes) == "$before" ]] || fail "the host has written because of the label"
  finding="the label stays; in 3 s nobody wrote anything"
}

autoscale() {
  say "The user takes the number of pods out of the spec: from here on an autoscaler decides it." \
    "(Until one does, Kubernetes has a default of its own: one pod.)"
  show "kubectl patch myapp web --type json --patch '[{\"op\": \"remove\", \"path\": \"/spec/replicas\"}]'"
  eventually "$patience" "the default of 1 pod, and the MyApp says so" settled_at 1
  say "The autoscaler, played by kubectl, wants five:"
  show "kubectl scale deployment web --replicas 5"
  eventually "$patience" "5 ready pods, and the MyApp says so" settled_at 5
  eventually 30 "nobody writes any more" is_quiet 1
  left_alone 3
  show "kubectl get deployment web"
  look "kubectl get myapp web"
  is deployment/web .spec.replicas 5 || fail "the number of pods was set back"
  finding="5 pods stay; in 3 s nobody wrote anything"
}

roll() {
  local before start
  before=$(ready_pods)
  say "The user changes the config. Pods do not notice a changed ConfigMap, so the plugin has them replaced:"
  start=$(now)
  show "kubectl patch myapp web --type merge --patch '{\"spec\": {\"config\": {\"color\": \"green\"}}}'"
  eventually "$patience" "all pods are new and ready" is_rolled "$before"
  finding="5 new pods in place of the old, after $(since "$start")"
  look "kubectl get replicasets,pods -l $ours"
  is configmap/web-config .data.color green || fail "the ConfigMap is not as it should be"
}

# None of the former pods is left, and five are ready.
is_rolled() {
  local pods
  pods=$(ready_pods)
  [[ $(wc -l <<<"$pods") == 5 && -z $(comm -12 <(printf '%s\n' "$1") <(printf '%s\n' "$pods")) ]] &&
    is deployment/web .status.replicas 5 && is deployment/web .status.updatedReplicas 5
}

swap() {
  local start before
  before=$(field clusterreconciler/myapp .status.activeRevision)
  say "A developer changes the plugin: one annotation more on each child. Nothing but the plugin is built:"
  edited_plugin
  look "diff $root/plugins/myapp/src/lib.rs version-2/src/lib.rs || true"
  show "pilothouse build version-2 --output version-2.wasm 2>/dev/null && ls -l version-2.wasm | cut -d ' ' -f 5-"
  say "And it is pushed into the ConfigMap of the plugin, while the host runs:"
  start=$(now)
  push version-2.wasm
  eventually "$patience" "all children are of version 2" made_by_version_2
  finding="all children changed $(since "$start") after the push; the host was not restarted"
  look "kubectl get deployment/web configmap/web-config -o custom-columns='KIND:.kind,NAME:.metadata.name,MADE BY:.metadata.annotations.mygroup\.example\.com/made-by'"
  look "kubectl get clusterreconcilers"
  host_is_alive || fail "the host has ended"
  [[ $(field clusterreconciler/myapp .status.activeRevision) != "$before" ]] || fail "the revision is the same"
}

# The plugin's crate in another folder, with one thing changed.
edited_plugin() {
  mkdir -p version-2/src
  cp "$root/plugins/myapp/crd.json" "$root/Cargo.lock" version-2/
  sed 's|"labels": labels(app) },$|"labels": labels(app), "annotations": { "mygroup.example.com/made-by": "version 2" } },|' \
    "$root/plugins/myapp/src/lib.rs" >version-2/src/lib.rs
  cp "$root/plugins/myapp/src/outside.rs" version-2/src/
  # Of another name: cargo gives the libraries of two crates of one name the same file, and takes the one for the other next time.
  cat >version-2/Cargo.toml <<END
[package]
name = "myapp-version-2"
version = "2.0.0"
edition = "2024"

[dependencies]
pilothouse-sdk = { path = "$root/guest-sdk/rust" }
schemars = "1"
serde = { version = "1", features = ["derive"] }

[workspace]
END
}

push() {
  show "kubectl create configmap myapp-plugin --namespace pilothouse-system --from-file plugin.wasm=$1 --dry-run=client -o yaml | kubectl apply --server-side --force-conflicts -f -"
}

made_by_version_2() { made_by "version 2"; }

made_by() {
  local by='.metadata.annotations.mygroup\.example\.com/made-by'
  is deployment/web "$by" "$1" && is configmap/web-config "$by" "$1"
}

refuse() {
  local degraded='.status.conditions[?(@.type=="Degraded")]'
  say "The next version is broken: half of the file is missing."
  show "head -c 50000 version-2.wasm >version-3.wasm"
  push version-3.wasm
  eventually "$patience" "the host says that version 3 does not work" is clusterreconciler/myapp "$degraded.status" True
  look "kubectl get clusterreconciler myapp -o jsonpath='Degraded={$degraded.status}: {$degraded.message}'; echo"
  say "Version 2 goes on serving. The user changes the image:"
  show "kubectl patch myapp web --type merge --patch '{\"spec\": {\"image\": \"nginx:1.28\"}}'"
  eventually "$patience" "the Deployment has the new image" is deployment/web '.spec.template.spec.containers[0].image' nginx:1.28
  made_by_version_2 || fail "the children are no longer of version 2"
  finding="refused, with the reason in condition Degraded; version 2 goes on serving"
}

restart() {
  local before
  eventually "$patience" "5 ready pods, and the MyApp says so" settled_at 5
  eventually 30 "nobody writes any more" is_quiet 1
  before=$(written)
  say "The host is killed and started again. It finds the broken version 3, takes the last good one from the cluster, reads" \
    "everything, and sees that there is nothing to do:"
  disown "$host_pid" # or bash would tell of the kill, too
  show "kill -KILL $host_pid"
  while kill -0 "$host_pid" 2>/dev/null; do sleep 0.05; done
  host_pid=
  start_host
  eventually 30 "it watches again" grep -q '"message":"watching"' "$host_log"
  left_alone 3
  [[ $(written) == "$before" ]] || fail "the host has written after its restart"
  look "grep -E '\"message\":\"(the last good revision serves|watching)\"' host.log | sed 's/.*\"message\":\"\([^\"]*\)\".*/\1/'"
  finding="the restarted host serves version 2; it wrote nothing"
}

publish() {
  local start rollout='.status.rollout'
  say "A ConfigMap is for small plugins. Others come from a registry, signed, and by digest. Version 2 goes there first, then the next one:"
  # As long a text, so that what is edited is still a component.
  sed 's/version 2/version 4/' version-2.wasm >version-4.wasm
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out cosign.key 2>/dev/null
  openssl pkey -in cosign.key -pubout -out cosign.pub
  for version in 2 4; do
    show "pilothouse push version-$version.wasm $registry/demo/myapp:$version --insecure-registry $registry"
    cp out "image-$version"
    show "pilothouse sign $registry/demo/myapp:$version --key cosign.key --insecure-registry $registry >/dev/null"
  done
  say "Four more MyApps, so that there is something to go over step by step:"
  for name in a b c d; do
    sed "s/name: web/name: $name/; s/replicas: 3/replicas: 1/" web.yaml
    say ---
  done >more.yaml
  show "kubectl apply -f more.yaml"
  eventually "$patience" "the host has made them" more_are_there
  say "What would version 4 change? Nothing is changed by asking:"
  look "pilothouse preview myapp version-4.wasm | tail -n 12 || true"
  say "It takes over in two steps: 40 % of the parents, and after 5 s all of them, if they are well. The signature is a condition of its own:"
  start=$(now)
  plugin_from "$(<image-4)" '"rollout": {"strategy": "Staged", "steps": [{"percent": 40, "pause": "5s"}]}, '
  eventually "$patience" "the first step" is clusterreconciler/myapp "$rollout.state" Progressing
  look "kubectl get clusterreconciler myapp -o jsonpath='{$rollout.preview}{\"\n\"}{$rollout.message}{\"\n\"}'"
  eventually "$patience" "all parents are on version 4" is clusterreconciler/myapp "$rollout.state" Complete
  eventually "$patience" "all children are of version 4" made_by "version 4"
  finding="signed, previewed, and on all parents $(since "$start") after it was asked for"
  look "kubectl get clusterreconciler myapp -o jsonpath='{range .status.conditions[*]}{.type}={.status} {.reason}{\"\n\"}{end}' | grep -E 'Resolved|Verified|Progressing'"
  is clusterreconciler/myapp '.status.conditions[?(@.type=="Verified")].reason' Verified || fail "nobody has verified the signature"
  say "Back again is the digest of before. Nothing is compiled, and there are no steps on the way:"
  start=$(now)
  plugin_from "$(<image-2)" ''
  eventually "$patience" "all children are of version 2" made_by "version 2"
  finding="$finding; back $(since "$start") after that was asked for"
  show "kubectl delete -f more.yaml --timeout ${patience}s"
}

# The plugin comes from this image from now on, signed by us.
plugin_from() {
  printf '{"spec": {%s"plugin": {"configMap": null, "image": "%s", "verify": {"cosign": {"publicKey": "%s"}}}}}' \
    "$2" "$1" "$(sed ':a; N; $!ba; s/\n/\\n/g' cosign.pub)" >patch.json
  show "kubectl patch clusterreconciler myapp --type merge --patch-file patch.json"
}

more_are_there() { [[ $(kubectl get deployments a b c d -o name | wc -l) == 4 ]]; }

delete() {
  local start
  say "A plugin may have made things outside the cluster, so a finalizer of ours holds the MyApp until they are gone:"
  look "kubectl get myapp web -o jsonpath='{.metadata.finalizers}'; echo"
  [[ $(<out) == *'"pilothouse.dev/c-myapp-'* ]] || fail "the finalizer is not there"
  start=$(now)
  show "kubectl delete myapp web --timeout ${patience}s"
  finding="finalizer, cleanup by the plugin, gone after $(since "$start"); no child is left"
  say "What the plugin has logged, asked to clean up:"
  eventually 10 "the plugin has logged its cleanup" cleaned_up
  look "grep '\"target\":\"plugin\"' host.log | tail -n 1 | cut -c 1-160"
  say "The children go after it: that is the garbage collector of Kubernetes, which may take half a minute with a kind as new as this."
  eventually "$patience" "no child of the MyApp is left" nothing_left
  look "kubectl get myapps,$children -l $ours"
  [[ -z $(kubectl get myapps -o name) ]] || fail "the MyApp is still there"
}

# The seed of it all: a record is deleted, the host dies, and the bucket is still there.
outside() {
  local start
  sed 's/name: web/name: shop/; s/replicas: 3/replicas: 1/' web.yaml >shop.yaml
  printf '  databaseID: shop\n  bucketName: shop-pictures\n' >>shop.yaml
  say "A MyApp that has a record in PostgreSQL and a bucket in S3:"
  show "kubectl apply -f shop.yaml"
  eventually "$patience" "the record is there" is myapp/shop '.status.conditions[?(@.type=="RecordReady")].status' True
  eventually "$patience" "the bucket is there" is myapp/shop '.status.conditions[?(@.type=="BucketReady")].status' True
  echo a picture >"$buckets/shop-pictures/picture"
  look_outside
  [[ $(<out) == *shop*shop-pictures*picture* ]] || fail "record and bucket are not there"
  say "S3 is down, and the MyApp is deleted. Its record goes first:"
  tell_servers stop-buckets
  show "kubectl delete myapp shop --wait=false"
  eventually "$patience" "the record is deleted" is myapp/shop '.status.conditions[?(@.type=="RecordDeleted")].status' True
  eventually "$patience" "the cleanup has failed" is myapp/shop '.status.conditions[?(@.type=="Synced")].status' False
  say "Between the two deletions the host is killed:"
  disown "$host_pid"
  show "kill -KILL $host_pid"
  while kill -0 "$host_pid" 2>/dev/null; do sleep 0.05; done
  host_pid=
  look_outside
  [[ $(<out) != *default/shop* && $(<out) == *shop-pictures* ]] || fail "the bucket should be there, and the record not"
  look "kubectl get myapp shop -o jsonpath='{.metadata.finalizers}{\"\n\"}{range .status.conditions[*]}{.type}={.status} {.message}{\"\n\"}{end}' | cut -c 1-200"
  say "S3 comes back, and so does the host. It asks the plugin again, to which a record that is gone already is no failure:"
  tell_servers start-buckets
  start=$(now)
  start_host
  show "kubectl wait --for delete myapp/shop --timeout ${patience}s"
  look_outside
  [[ $(<out) != *shop* ]] || fail "something is left outside of the cluster"
  finding="killed between the two; gone $(since "$start") after its restart, and so are record and bucket"
}

# The records and the buckets, as they are.
look_outside() {
  look "psql \"\$database\" -Atc 'SELECT id, owner FROM myapps'; (cd \"\$buckets\" && find . -mindepth 1)"
}

cleaned_up() { grep '"target":"plugin"' "$host_log" | grep -q 'nothing of web is left outside the cluster'; }

nothing_left() { [[ -z $(kubectl get "$children" -l "$ours" -o name) ]]; }

summary() {
  local i
  say "" "${bold}All of it was observed:$plain"
  for i in "${!titles[@]}"; do
    printf '  %s%2d%s  %-44s %s\n' "$green" $((i + 1)) "$plain" "${titles[i]}" "${findings[i]}"
  done
  say "" "Next, a plugin of your own: \"Your first plugin\" in README.md. This one is plugins/myapp/src/lib.rs."
}

main() {
  exec 7>&1 8>&2
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  prepare
  if [[ -n $use_cluster ]]; then
    use_existing_cluster
  else
    start_control_plane
    start_registry
  fi
  own_kubeconfig
  start_servers
  step "Install the host" install_host
  step "Install the plugin for MyApp" install_plugin
  step "Create a MyApp" create
  step "Somebody changes a field of ours" heal
  step "Somebody labels the Deployment" foreign_label
  step "An autoscaler takes over the number of pods" autoscale
  step "Change the config" roll
  step "Swap the plugin while the host runs" swap
  step "Push a broken plugin" refuse
  step "Kill the host, and start it again" restart
  # Your cluster has a registry of its own.
  [[ -z $registry ]] || step "Publish, preview, go step by step, go back" publish
  step "Kill the host in the midst of a cleanup" outside
  step "Delete the MyApp" delete
  summary
}

main
