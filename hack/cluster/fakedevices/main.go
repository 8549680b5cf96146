// Command fakedevices is a DRA driver whose devices exist on paper: what ResourceClaims need of a GPU, without one.
//
// It publishes the devices gpu-0, gpu-1, … of its node. A container that gets one finds a file
// /dev/gpu-0: every container of the node that has this device shares that file, which stands for
// the device's memory. Whoever holds a flock on it "has memory on the device"; so a judge can see
// from outside who does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// driverName is also the domain of the devices' attributes; hack/cluster/localkube/fakedevices.py says it, too.
const driverName = "gpu.example.com"

func main() {
	node := flag.String("node", "", "name of this node, and of its pool of devices")
	kubeconfig := flag.String("kubeconfig", "", "the kubelet's: a node may publish its own devices")
	count := flag.Int("devices", 1, "devices of this node")
	specs := flag.String("cdi", "/run/cdi", "folder where the container runtime looks for CDI files")
	memory := flag.String("memory", "/run/devices", "folder of the files that stand for the devices' memory")
	flag.Parse()
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	driver := &Driver{Node: *node, Specs: *specs, Memory: *memory}
	if err := run(stop, driver, *kubeconfig, *count); err != nil {
		log.Fatal(err)
	}
}

// run registers the driver with the kubelet, publishes its devices and serves until `stop`.
func run(stop context.Context, driver *Driver, kubeconfig string, count int) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(kubeletplugin.KubeletPluginsDir, driverName)
	for _, folder := range []string{kubeletplugin.KubeletRegistryDir, data, driver.Specs, driver.Memory} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	plugin, err := kubeletplugin.Start(stop, driver, kubeletplugin.DriverName(driverName),
		kubeletplugin.NodeName(driver.Node), kubeletplugin.KubeClient(client))
	if err != nil {
		return err
	}
	defer plugin.Stop()
	slices := []resourceslice.Slice{{Devices: devices(driver.Node, count)}}
	pools := map[string]resourceslice.Pool{driver.Node: {Slices: slices}}
	if err := plugin.PublishResources(stop, resourceslice.DriverResources{Pools: pools}); err != nil {
		return err
	}
	log.Printf("%d devices published", count)
	<-stop.Done()
	return nil
}

// devices returns gpu-0, gpu-1, … with the attributes that a selector may ask for.
func devices(node string, count int) []resourceapi.Device {
	made := make([]resourceapi.Device, count)
	for i := range made {
		index, uuid := int64(i), fmt.Sprintf("GPU-%s-%d", node, i)
		made[i] = resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"index": {IntValue: &index},
				"uuid":  {StringValue: &uuid},
			},
		}
	}
	return made
}

// PrepareResourceClaims answers for each claim by itself: one that can't be prepared fails alone.
func (d *Driver) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		prepared, err := d.Prepare(claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: prepared, Err: err}
		log.Printf("prepare %s/%s (%s): %d devices, error: %v", claim.Namespace, claim.Name, claim.UID, len(prepared), err)
	}
	return results, nil
}

// UnprepareResourceClaims forgets claims; one that is unknown is forgotten already.
func (d *Driver) UnprepareResourceClaims(
	_ context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = d.Unprepare(claim.UID)
		log.Printf("unprepare %s (%s), error: %v", claim, claim.UID, results[claim.UID])
	}
	return results, nil
}

// HandleError ends the process on what no retry mends; the node's init starts it again.
func (d *Driver) HandleError(_ context.Context, err error, message string) {
	log.Printf("%s: %v", message, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		os.Exit(1)
	}
}
