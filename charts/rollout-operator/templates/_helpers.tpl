{{- define "rollout-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rollout-operator.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "rollout-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "rollout-operator.labels" -}}
{{ include "rollout-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "rollout-operator.chart" . }}
{{- end -}}

{{/* The labels, with those of a value, which win: no key stands twice. Called with a list: root, labels. */}}
{{- define "rollout-operator.labelsWith" -}}
{{- $ours := include "rollout-operator.labels" (index . 0) | fromYaml -}}
{{- merge (deepCopy (index . 1)) $ours | toYaml -}}
{{- end -}}

{{- define "rollout-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "rollout-operator.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "rollout-operator.image" -}}
{{- $name := printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- if .Values.image.digest -}}
{{- $name = printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- end -}}
{{- include "rollout-operator.fullImage" (list . $name) -}}
{{- end -}}

{{/* An image with global.imageRegistry in front, unless its name has a registry. Called with a list: root, image. */}}
{{- define "rollout-operator.fullImage" -}}
{{- $registry := (index . 0).Values.global.imageRegistry -}}
{{- $image := index . 1 -}}
{{- $first := first (splitList "/" $image) -}}
{{- $host := and (contains "/" $image) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- ternary $image (printf "%s/%s" $registry $image) (or (not $registry) $host) -}}
{{- end -}}

{{/* Secrets for pulling, as JSON: those given, and the global ones that are not among them. Called with a list: root, secrets. */}}
{{- define "rollout-operator.pullSecrets" -}}
{{- $secrets := index . 1 | default list -}}
{{- range (index . 0).Values.global.imagePullSecrets -}}
{{- $secret := kindIs "string" . | ternary (dict "name" .) . -}}
{{- if not (has $secret $secrets) -}}
{{- $secrets = append $secrets $secret -}}
{{- end -}}
{{- end -}}
{{- toJson $secrets -}}
{{- end -}}

{{/* Namespaces that the operator watches, as JSON; empty: all. */}}
{{- define "rollout-operator.watched" -}}
{{- $own := ternary (list .Release.Namespace) list .Values.rbac.namespaced -}}
{{- .Values.watchNamespaces | default $own | uniq | toJson -}}
{{- end -}}

{{/* Namespaces with workers, as JSON: told, else the watched ones, else the release's own; and those of
     colocated pools, whose workers need the same rights. */}}
{{- define "rollout-operator.workerNamespaces" -}}
{{- $own := list .Release.Namespace -}}
{{- $told := .Values.workers.namespaces | default .Values.watchNamespaces | default $own -}}
{{- concat $told .Values.colocation.namespaces | uniq | toJson -}}
{{- end -}}

{{/* Whether something that another release of this chart left behind has this name: helm would refuse
     to touch it. Called with a list: kind's API version, kind, namespace, name, release. */}}
{{- define "rollout-operator.anothers" -}}
{{- $found := lookup (index . 0) (index . 1) (index . 2) (index . 3) -}}
{{- $meta := $found.metadata | default dict -}}
{{- $labels := $meta.labels | default dict -}}
{{- $notes := $meta.annotations | default dict -}}
{{- $owner := printf "%s/%s" (index $notes "meta.helm.sh/release-namespace") (index $notes "meta.helm.sh/release-name") -}}
{{- $release := index . 4 -}}
{{- $ours := printf "%s/%s" $release.Namespace $release.Name -}}
{{- if and (eq (index $labels "app.kubernetes.io/name" | default "") "rollout-operator") (ne $owner $ours) -}}
true
{{- end -}}
{{- end -}}

{{/* Selects the workers of this operator's class. Called with a list: root, further labels. */}}
{{- define "rollout-operator.workerSelector" -}}
{{- $class := (index . 0).Values.operatorClass -}}
{{- $labels := merge (dict "app.kubernetes.io/name" "rollout-worker") (index . 1) -}}
{{- if $class -}}
{{- $labels = merge $labels (dict "rollout.dev/operator-class" $class) -}}
{{- end -}}
matchLabels:
  {{- toYaml $labels | nindent 2 }}
{{- if not $class }}
matchExpressions:
  - {key: rollout.dev/operator-class, operator: DoesNotExist}
{{- end -}}
{{- end -}}

{{/* Labels of the DaemonSet's pods: not the operator's, which its Service selects. */}}
{{- define "rollout-operator.nodeLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-node
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Claim of the lock directory in each namespace with colocated pools; empty: there is none. */}}
{{- define "rollout-operator.turnClaim" -}}
{{- .Values.colocation.claim | default (ternary "rollout-turn" "" .Values.colocation.enabled) -}}
{{- end -}}

{{/* What running workers need stays after an uninstall, as their objects do. */}}
{{- define "rollout-operator.kept" -}}
{{- if .Values.crds.keep -}}
helm.sh/resource-policy: keep
{{- end -}}
{{- end -}}

{{/* Rights of the operator where its pools live; a test compares them with what it calls. */}}
{{- define "rollout-operator.rules" -}}
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas]
  verbs: [list, watch]
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# A trainer's claims, on which the pods of colocated pools are made.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [list, watch]
# Services go with their owner, by the garbage collector.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
# Of Hybrid pools, whose pods are a trainer's: who is in their Services. They go with their owner, too.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch, create, patch]
# How many of a pool's pods evictions must leave. They go with their owner, too.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# Groups of pods that a gang scheduler starts together; where the cluster has none, these grant nothing.
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
# The readiness gate rollout.dev/serving is a condition of the pod.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
# Never requested from the API server: workers ask in an access review whether the operator may.
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas/control]
  verbs: [get, update]
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas/weights]
  verbs: [create]
{{- end -}}
