#!/usr/bin/env bash
# What a host costs: memory at rest, the time of a plugin call, and memory for each cached object, measured by its own metrics on a
# control plane of its own. `make measure` builds the optimised host and runs this.
#
#     tests/measure.sh CONTROL_PLANE HOST MYAPP.wasm [PARENTS]
set -euo pipefail
control_plane=$(realpath "$1")
host=$(realpath "$2")
plugin=$(realpath "$3")
parents=${4:-1000}
folder=$(mktemp -d)
here=$(dirname "$(realpath "$0")")
pids=()
finish() {
  exec 9>&-
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$folder"
}
trap finish EXIT
# It ends when its input is closed, in whatever way this ends.
mkfifo "$folder/control"
"$control_plane" run <"$folder/control" >"$folder/location" 2>"$folder/control-plane.log" &
pids+=($!)
exec 9>"$folder/control"
until grep -q '}$' "$folder/location" 2>/dev/null; do
  kill -0 "${pids[0]}" || { cat "$folder/location" "$folder/control-plane.log" >&2; exit 1; }
  sleep 0.2
done
text_of() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" "$folder/location"; }
KUBECONFIG=$(text_of kubeconfig)
PATH=$(text_of binDir):$PATH
export KUBECONFIG PATH
"$host" crds | kubectl apply --server-side -f - >/dev/null
kubectl apply --server-side -f "$here/../host/deploy/host.yaml" >/dev/null
cp "$KUBECONFIG" "$folder/kubeconfig"
kubectl --kubeconfig "$folder/kubeconfig" config set-credentials host \
  --token "$(kubectl create token pilothouse --namespace pilothouse-system --duration 8h)" >/dev/null
kubectl --kubeconfig "$folder/kubeconfig" config set-context --current --user host >/dev/null

KUBECONFIG=$folder/kubeconfig "$host" run --log-format json --health-probe-bind-address 127.0.0.1:0 \
  --metrics-bind-address 127.0.0.1:0 2>"$folder/log" 9>&- &
pids+=($!)
metrics() { curl --silent --fail "http://$(grep -o '"metrics":"[^"]*"' "$folder/log" | head -n 1 | cut -d '"' -f 4)/metrics"; }
value() { awk -v name="$1" 'index($0, name) == 1 { sum += $NF } END { print sum + 0 }' "$folder/metrics"; }

"$host" manifests "$plugin" --grants "$here/../plugins/myapp/grants.yaml" | kubectl apply --server-side -f - >/dev/null
kubectl wait --for condition=Ready clusterreconciler/myapp --timeout 60s >/dev/null
sleep 5
metrics >"$folder/metrics"
idle=$(value process_resident_memory_bytes)

for n in $(seq "$parents"); do
  printf -- '---\n{apiVersion: mygroup.example.com/v1, kind: MyApp, metadata: {name: app-%s, namespace: default}, spec: {image: "nginx:1", replicas: 0, config: {a: "%s"}}}\n' "$n" "$n"
done | kubectl apply --server-side -f - >/dev/null
until [ "$(kubectl get clusterreconciler myapp -o jsonpath='{.status.parents.ready}')" = "$parents" ]; do sleep 1; done
metrics >"$folder/metrics"
busy=$(value process_resident_memory_bytes)
cached=$(value pilothouse_store_bytes)
objects=$(value pilothouse_store_objects)
served=$(for path in /apis/mygroup.example.com/v1/myapps '/apis/apps/v1/deployments?labelSelector=internal.pilothouse.dev/reconciler' '/api/v1/configmaps?labelSelector=internal.pilothouse.dev/reconciler'; do
  kubectl get --raw "$path"
done | wc -c)
median=$(awk '
  /^pilothouse_plugin_call_seconds_bucket\{.*function="reconcile"/ {
    match($0, /le="[^"]*"/); le = substr($0, RSTART + 4, RLENGTH - 5); bound[++n] = le; upto[n] = $NF
  }
  END {
    for (i = 1; i <= n; i++) if (upto[i] >= upto[n] / 2) {
      low = i > 1 ? bound[i - 1] : 0; before = i > 1 ? upto[i - 1] : 0
      printf "%.0f", 1e6 * (low + (bound[i] - low) * (upto[n] / 2 - before) / (upto[i] - before)); exit
    }
  }' "$folder/metrics")
printf '%-48s %8.1f MB\n' "memory at rest, one plugin, no parents" "$(awk "BEGIN { print $idle / 1e6 }")"
printf '%-48s %8.1f MB\n' "memory with $parents parents, $objects objects" "$(awk "BEGIN { print $busy / 1e6 }")"
printf '%-48s %8.0f µs\n' "plugin call (MyApp), median, interpolated" "$median"
printf '%-48s %8.0f bytes\n' "cached: a parent and its children" "$(awk "BEGIN { print $cached / $parents }")"
printf '%-48s %8.2f\n' "cached, as a part of the JSON that is served" "$(awk "BEGIN { print $cached / $served }")"
