module rollout.dev/hack/pause

go 1.26
