// Sarama. What it is asked: record_lines.py
package main

import (
	"bufio"
	"encoding/base64"
	"fmt"
	"io/ioutil"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/Shopify/sarama"
)

var codecs = map[string]sarama.CompressionCodec{
	"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy,
	"lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD,
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func number(text string) int64 {
	found, err := strconv.ParseInt(text, 10, 64)
	check(err)
	return found
}

func meant(text string) []byte {
	if text == "-" {
		return nil
	}
	found, err := base64.StdEncoding.DecodeString(text)
	check(err)
	return found
}

func shown(value []byte) string {
	if value == nil {
		return "-"
	}
	return base64.StdEncoding.EncodeToString(value)
}

func encoder(value []byte) sarama.Encoder {
	if value == nil {
		return nil
	}
	return sarama.ByteEncoder(value)
}

func settings() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.V2_1_0_0
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.MaxMessageBytes = 2000000
	config.Producer.Flush.Frequency = 20 * time.Millisecond
	config.Consumer.MaxWaitTime = 20 * time.Millisecond // it asks for each partition's offsets behind a fetch
	return config
}

func message(topic string, line string) *sarama.ProducerMessage {
	fields := strings.Split(line, "\t")
	made := &sarama.ProducerMessage{Topic: topic, Partition: int32(number(fields[1]))}
	made.Key, made.Value = encoder(meant(fields[4])), encoder(meant(fields[5]))
	if fields[3] != "-" {
		ms := number(fields[3])
		made.Timestamp = time.Unix(ms/1000, ms%1000*1000000)
	}
	for _, field := range fields[6:] {
		parts := strings.Split(field, ":")
		made.Headers = append(made.Headers, sarama.RecordHeader{Key: meant(parts[0]), Value: meant(parts[1])})
	}
	return made
}

func produce(bootstrap string, pairs []string) {
	input, err := ioutil.ReadAll(os.Stdin)
	check(err)
	lines := strings.Split(strings.TrimSuffix(string(input), "\n"), "\n")
	for _, pair := range pairs {
		parts := strings.Split(pair, "=")
		config := settings()
		config.Producer.Compression = codecs[parts[1]]
		producer, err := sarama.NewSyncProducer([]string{bootstrap}, config)
		check(err)
		messages := make([]*sarama.ProducerMessage, 0, len(lines))
		for _, line := range lines {
			messages = append(messages, message(parts[0], line))
		}
		check(producer.SendMessages(messages))
		check(producer.Close())
	}
}

func consume(bootstrap string, pairs []string) {
	consumer, err := sarama.NewConsumer([]string{bootstrap}, settings())
	check(err)
	found, left := make(chan *sarama.ConsumerMessage), 0
	for _, pair := range pairs {
		parts := strings.Split(pair, "=")
		left += int(number(parts[1]))
		for partition := int32(0); partition < 2; partition++ {
			reading, err := consumer.ConsumePartition(parts[0], partition, sarama.OffsetOldest)
			check(err)
			go func() {
				for each := range reading.Messages() {
					found <- each
				}
			}()
		}
	}
	output, late := bufio.NewWriter(os.Stdout), time.After(60*time.Second)
	for ; left > 0; left-- {
		select {
		case each := <-found:
			ms := each.Timestamp.Unix()*1000 + int64(each.Timestamp.Nanosecond()/1000000)
			fmt.Fprintf(output, "%s\t%d\t%d\t%d", each.Topic, each.Partition, each.Offset, ms)
			fmt.Fprintf(output, "\t%s\t%s", shown(each.Key), shown(each.Value))
			for _, header := range each.Headers {
				fmt.Fprintf(output, "\t%s:%s", shown(header.Key), shown(header.Value))
			}
			fmt.Fprintln(output)
		case <-late:
			panic(fmt.Sprintf("%d are not read", left))
		}
	}
	check(output.Flush())
}

func main() {
	if os.Args[1] == "produce" {
		produce(os.Args[2], os.Args[3:])
	} else {
		consume(os.Args[2], os.Args[3:])
	}
}
