package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// cdiKind is the vendor and class of the CDI devices, of which each claim's requests have one each.
const cdiKind = "example.com/gpu"

// Driver prepares claims for the containers of one node. Its only memory are the CDI files, one a
// claim, so it may be killed at any moment.
type Driver struct{ Node, Specs, Memory string }

// spec is a CDI file: what the container runtime adds to a container that uses one of its devices.
type spec struct {
	Version string      `json:"cdiVersion"`
	Kind    string      `json:"kind"`
	Devices []cdiDevice `json:"devices"`
}

type cdiDevice struct {
	Name  string `json:"name"`
	Edits edits  `json:"containerEdits"`
}

type edits struct {
	Env    []string `json:"env"`
	Mounts []mount  `json:"mounts"`
}

type mount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
}

// Prepare writes the claim's CDI file; again and again with the same result.
func (d *Driver) Prepare(claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	byRequest := map[string][]string{}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != driverName {
			continue
		}
		// A pod with a nodeName of its own passes the scheduler by, and the kubelet does not look.
		if result.Pool != d.Node {
			return nil, fmt.Errorf("%s is allocated on node %s, this is %s", result.Device, result.Pool, d.Node)
		}
		if holder, err := d.holder(result.Device, claim.UID); err != nil {
			return nil, err
		} else if holder != "" {
			return nil, fmt.Errorf("%s is still prepared for claim %s", result.Device, holder)
		}
		byRequest[result.Request] = append(byRequest[result.Request], result.Device)
	}
	file := spec{Version: "0.6.0", Kind: cdiKind}
	var prepared []kubeletplugin.Device
	for request, names := range byRequest {
		sort.Strings(names)
		device, err := d.device(claim.UID, request, names)
		if err != nil {
			return nil, err
		}
		file.Devices = append(file.Devices, device)
		for i, name := range names {
			part := kubeletplugin.Device{Requests: []string{request}, PoolName: d.Node, DeviceName: name}
			if i == 0 { // one CDI device carries all of a request
				part.CDIDeviceIDs = []string{cdiKind + "=" + device.Name}
			}
			prepared = append(prepared, part)
		}
	}
	return prepared, d.write(claim.UID, file)
}

// Unprepare removes the claim's CDI file if there is one.
func (d *Driver) Unprepare(claim types.UID) error {
	if err := os.Remove(d.path(claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// device returns what one request of a claim brings into a container.
func (d *Driver) device(claim types.UID, request string, names []string) (cdiDevice, error) {
	plain := strings.NewReplacer("/", "_", "-", "_").Replace(request)
	made := cdiDevice{Name: string(claim) + "-" + plain}
	// Named after the request: a container may use several of the same claim.
	made.Edits.Env = []string{"GPU_DEVICES_" + strings.ToUpper(plain) + "=" + strings.Join(names, ",")}
	for _, name := range names {
		path := filepath.Join(d.Memory, name)
		if err := touch(path); err != nil {
			return made, err
		}
		options := []string{"bind", "rw"}
		made.Edits.Mounts = append(made.Edits.Mounts, mount{path, "/dev/" + name, options})
	}
	return made, nil
}

// holder returns the other claim that the device is prepared for: after a forced delete of a pod the
// scheduler may give its devices away while its containers still run. Empty: there is none.
func (d *Driver) holder(device string, claim types.UID) (string, error) {
	paths, err := filepath.Glob(d.path("*"))
	if err != nil {
		return "", err
	}
	for _, path := range paths {
		if path == d.path(claim) {
			continue
		}
		var other spec
		text, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		if err := json.Unmarshal(text, &other); err != nil {
			return "", err
		}
		memory := filepath.Join(d.Memory, device)
		for _, known := range other.Devices {
			if slices.ContainsFunc(known.Edits.Mounts, func(m mount) bool { return m.HostPath == memory }) {
				return strings.TrimSuffix(filepath.Base(path), ".json"), nil
			}
		}
	}
	return "", nil
}

func (d *Driver) path(claim types.UID) string {
	return filepath.Join(d.Specs, "claim-"+string(claim)+".json")
}

// write replaces the claim's file at once: the container runtime watches the folder.
func (d *Driver) write(claim types.UID, file spec) error {
	text, err := json.Marshal(file)
	if err != nil {
		return err
	}
	draft := d.path(claim) + ".new"
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return err
	}
	return os.Rename(draft, d.path(claim))
}

// touch makes the file that every container of the device shares, whoever its user is.
func touch(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	defer file.Close()
	return file.Chmod(0o666) // past the umask
}
